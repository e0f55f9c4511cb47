"""Refuse what the engine, another argument or a parameter of vLLM's excludes.

All reasons are rows of one table, in three parts by when they are checked.
"""

from collections.abc import Callable
from typing import NamedTuple

from dllm_plugin.config.decode import Case
from dllm_plugin.config.options import FILL, REQUEST_FIELDS, REQUEST_PREFIX
from dllm_plugin.config.request.arguments import (
    ARGUMENTS,
    AUTOMATON,
    end_of_gaps,
    refuse_unread,
)
from dllm_plugin.config.request.checks import (
    PENALTIES,
    beside_stages,
    no_template,
    too_long,
    too_many_forwards,
)
from dllm_plugin.config.request.structured_outputs import no_automaton
from dllm_plugin.config.validation import shown
from dllm_plugin.decoding.policies import SEVERAL_BLOCKS

OF_SEVERAL_BLOCKS = SEVERAL_BLOCKS[1:]


class Exclusion(NamedTuple):
    """Refuse arguments, options or parameters of vLLM's together with something else.

    names     of what is refused, separated by blanks
    meets     returns a true value if a request has both; a text is `{why}` in the sentence
    sentence  of the refusal; :func:`_sentence` lists what stands in braces
    """

    names: str
    meets: Callable[[Case, str], object]
    sentence: str


def _without_effect(case: Case, name: str) -> bool:
    """Return whether an argument is given that strategy and policy do not read."""
    known = ARGUMENTS[name]
    if name not in case.given or case.given[name] in known.off:
        return False
    method = case.config.method
    if name in REQUEST_FIELDS:
        return name not in method.options_read(case.asked.policy)
    return bool(known.needs) and not getattr(method, known.needs)


def _wrong_width(case: Case, name: str) -> str:
    """Return the first width of a schedule that no canvas has, and its place."""
    for place, width in enumerate(case.given.get(name, ())):
        if type(width) is not int or not 1 <= width <= case.config.canvas_length:
            return f"{shown(width)} at place {place}"
    return ""


def _wrong_count(case: Case, name: str) -> str:
    """Return how many targets and positions to fill a request has; empty if as many."""
    if name not in case.given:
        return ""
    count, wanted = len(case.given[name]), case.given["template"].count(FILL)
    if count == wanted:
        return ""
    return f"{count} tokens, but dllm_template has {wanted} positions to fill (-1)"


def _holds_mask(case: Case, name: str) -> bool:
    return case.config.mask_token_id in case.given.get(name, ())


def _several_gaps(case: Case, name: str) -> int:
    """Return the gaps of a template with several gaps if a parameter is set; else 0."""
    template = case.asked.template
    if template is None or len(template.gaps) == 1 or not case.is_set(name):
        return 0
    return len(template.gaps)


def _stops_before_gap(case: Case, name: str) -> bool:
    template, params = case.asked.template, case.params
    if template is None or not params.stop_token_ids:
        return False
    return len(template.ends(params.stop_token_ids)) < len(params.stop_token_ids)


WITH_ARGUMENTS = (
    Exclusion(
        "window block_length",
        lambda c, name: (
            name in (*c.given, "block_length")
            and c.asked.block_length > c.config.longest_block
        ),
        "{name} {value} is longer than the canvas of {config.longest_block} positions: lower "
        "{name} or raise canvas_length in additional_config.",
    ),
    Exclusion(
        "max_active_blocks",
        lambda c, name: c.given.get(name, 1) > c.config.max_active_blocks,
        "{name} {value} exceeds the engine's {config.max_active_blocks}: raise "
        "max_active_blocks in additional_config.",
    ),
    Exclusion(
        "schedule",
        lambda c, name: name in c.given and not c.config.method.floats,
        "{name} has no effect with adaptive 'off': leave it out, or start with adaptive "
        "'throughput' or 'balanced', which d2f and block_diffusion have.",
    ),
    Exclusion(
        "template targets",
        lambda c, name: name in c.given and no_template(c.config, f"dllm_{name}"),
        "{why}",
    ),
    Exclusion(
        " ".join(ARGUMENTS),
        _without_effect,
        "{name} has no effect with strategy {config.strategy!r} and policy {asked.policy!r} on "
        "{config.architecture}: remove it or choose another policy.",
    ),
    Exclusion(
        "block_length",
        lambda c, name: (
            c.config.method.floats
            and c.asked.block_length != c.config.defaults.block_length
        ),
        "{name} has no effect with adaptive {config.adaptive!r}, whose windows dllm_schedule "
        "sets: remove it.",
    ),
    Exclusion(
        "schedule",
        _wrong_width,
        "{name} must hold whole numbers between 1 and canvas_length {config.canvas_length}, got "
        "{why}.",
    ),
    Exclusion(
        "template",
        lambda c, name: too_long(c.config, end_of_gaps(c.given.get(name, ()))),
        "{why}",
    ),
    Exclusion(
        "template",
        lambda c, name: FILL not in c.given.get(name, (FILL,)),
        "{name} holds no position to fill (-1).",
    ),
    Exclusion(
        "template",
        _holds_mask,
        "{name} holds the mask token (id {config.mask_token_id}): write -1 for a position to "
        "fill.",
    ),
    Exclusion(
        "targets",
        lambda c, name: name in c.given and "template" not in c.given,
        "{name} needs dllm_template, whose positions to fill (-1) they are for.",
    ),
    Exclusion("targets", _wrong_count, "{name} holds {why}: they must be as many."),
    Exclusion(
        "targets",
        _holds_mask,
        "{name} holds the mask token (id {config.mask_token_id}), which no position takes.",
    ),
    Exclusion(
        "cfg_scale",
        lambda c, name: c.asked.template and c.asked.cfg_scale > 0,
        "{name} cannot be combined with dllm_template.",
    ),
    Exclusion(
        "suffix_window",
        lambda c, name: c.asked.template and c.given.get(name) is not None,
        "{name} cannot be combined with dllm_template, which is seen whole.",
    ),
    Exclusion(
        " ".join(REQUEST_FIELDS),
        lambda c, name: c.asked.targets and name in c.given,
        "'{name}' has no effect with dllm_targets, which one forward takes: leave it out.",
    ),
    Exclusion(
        "steps max_post_steps",
        too_many_forwards,
        "{name} {value} exceeds {why}: lower {option} or raise it in additional_config.",
    ),
    Exclusion(
        "refresh_before",
        lambda c, name: (
            c.given.get(name) is not None and c.asked.full_refresh_every == 1
        ),
        "{name} has no effect with full_refresh_every 1: remove it or raise full_refresh_every.",
    ),
    Exclusion(
        "max_thinking_tokens end_think_token_id",
        lambda c, name: c.asked.has_half_a_budget,
        "max_thinking_tokens and end_think_token_id need each other: give both or none.",
    ),
    Exclusion(
        "early_text",
        lambda c, name: c.config.method.causal and c.asked.early_text,
        "{name} is not supported on {config.architecture}: leave it out.",
    ),
    Exclusion(
        "trace", lambda c, name: c.asked.trace and c.config.no_traces, "{name} {why}."
    ),
    Exclusion(
        "early_text",
        lambda c, name: c.asked.early_text and c.edits,
        "{name} cannot be combined with policy {asked.policy}, which may still replace tokens "
        "of an open block.",
    ),
)
WITH_OPTIONS = (
    Exclusion("cfg_scale use_block_cache early_text", beside_stages, "{name} {why}."),
    Exclusion(
        "steps",
        lambda c, name: 0 < (c.given.get(name) or 0) < c.config.method.least_steps,
        "{name} must be at least {config.method.least_steps}, got {value}: the first step of a "
        "block decides one position.",
    ),
    Exclusion(
        " ".join(OF_SEVERAL_BLOCKS),
        lambda c, name: (
            name in c.given
            and c.config.method.next_block
            and c.asked.max_active_blocks == 1
        ),
        "{name} has no effect with max_active_blocks 1: remove it or raise max_active_blocks.",
    ),
    Exclusion(
        "use_block_cache",
        lambda c, name: c.asked.use_block_cache and not c.config.dedicated_commit,
        "{name} needs max_active_blocks 1, got {config.max_active_blocks}: the cache of a block "
        "is that of one block at a time.",
    ),
    Exclusion(
        "use_block_cache",
        lambda c, name: (
            c.asked.use_block_cache and c.config.kv_cache_layout == "distinct"
        ),
        "{name} needs kv_cache_layout 'unified': the attention of 'distinct' reads the canvas's "
        "keys from the same forward, not from the cache.",
    ),
    Exclusion(
        "refresh_before",
        lambda c, name: c.config.family.logits_shift and c.asked.refresh_before == 0,
        "{name} must be at least 1 on {config.architecture}, got 0: the row of the position "
        "before a block predicts its first token.",
    ),
)
WITH_PARAMETERS = (
    Exclusion(
        "top_p top_k",
        lambda c, name: name in c.given and c.params.temperature > 0,
        "{name} filters greedy requests: with temperature {params.temperature} use "
        "{option}.",
    ),
    Exclusion(
        "entropy_temperature",
        lambda c, name: name in c.given and c.params.temperature > 0,
        "{name} is for greedy requests: with temperature {params.temperature} the entropies "
        "are read at that, so leave it out.",
    ),
    Exclusion(
        "max_tokens",
        lambda c, name: (
            c.config.reserved and "template" not in c.given and c.params.max_tokens == 1
        ),
        "{name} must be at least 2 with this model, whose last position is reserved.",
    ),
    Exclusion(
        "max_tokens",
        lambda c, name: (
            c.asked.template and c.asked.template.end != c.params.max_tokens
        ),
        "{name} is {value}, but the last gap of dllm_template ends at {asked.template.end}: they "
        "must be equal.",
    ),
    Exclusion(
        "stop stop_token_ids", _several_gaps, "{name} needs a single gap, got {why}."
    ),
    Exclusion(
        "template",
        _stops_before_gap,
        "{name} gives a token of stop_token_ids in front of its gap: put it into the prompt, or "
        "leave it out of stop_token_ids.",
    ),
    Exclusion(
        "targets",
        lambda c, name: c.asked.targets and c.params.logprobs is None,
        "{name} needs logprobs: the answer says nothing else.",
    ),
    Exclusion(
        "targets",
        lambda c, name: c.asked.targets and not c.params.ignore_eos,
        "{name} needs ignore_eos: a target may be what ends a text.",
    ),
    Exclusion(
        "n stop stop_token_ids min_tokens bad_words allowed_token_ids logit_bias "
        + " ".join(PENALTIES),
        lambda c, name: c.asked.targets and c.is_set(name),
        "{name} cannot be combined with dllm_targets: leave it out.",
    ),
    Exclusion(
        "structured_outputs",
        lambda c, name: c.has_grammar and c.config.no_grammars,
        "{name} {why}.",
    ),
    Exclusion(
        "add_eos_at_end",
        lambda c, name: c.has_grammar and c.asked.add_eos_at_end,
        "{name} has no effect with structured_outputs, which reserves no position: leave it out.",
    ),
    Exclusion(
        "structured_outputs",
        lambda c, name: c.has_grammar and c.asked.template,
        "{name} cannot be combined with dllm_template.",
    ),
    Exclusion(
        "max_thinking_tokens end_think_token_id",
        lambda c, name: c.has_grammar and getattr(c.asked, name) is not None,
        "{name} can contradict the grammar of structured_outputs: leave {name} out.",
    ),
    Exclusion(
        "min_tokens ignore_eos bad_words allowed_token_ids",
        lambda c, name: c.has_grammar and c.is_set(name),
        "{name} {value} can contradict the grammar of structured_outputs: leave {name} out.",
    ),
    Exclusion(
        "early_text",
        lambda c, name: c.has_grammar and c.asked.early_text,
        "{name} sends tokens before the grammar of structured_outputs has checked them: leave "
        "{name} out.",
    ),
    Exclusion(
        "use_block_cache",
        lambda c, name: c.has_grammar and c.asked.use_block_cache,
        "{name} keeps the KV of drafts that the grammar of structured_outputs may refuse: turn "
        "use_block_cache off.",
    ),
    Exclusion(
        "grammar",
        lambda c, name: name in c.given and not c.has_grammar,
        "{name} has no effect without structured_outputs: leave it out.",
    ),
    Exclusion(
        "grammar",
        lambda c, name: (
            c.asked.grammar == AUTOMATON and no_automaton(c.params, c.asked, c.config)
        ),
        "{name} 'automaton' cannot be honoured: {why}.",
    ),
)


def refuse_options(case: Case) -> None:
    """Raise ValueError naming the first of the engine's options that is excluded."""
    refuse_unread(case.given, case.config.method, case.config.architecture)
    _refuse(case, WITH_OPTIONS, "")


def refuse_arguments(case: Case) -> None:
    """Raise ValueError naming the first argument that is excluded before admission."""
    _refuse(case, WITH_ARGUMENTS + WITH_OPTIONS, REQUEST_PREFIX)


def refuse_parameters(case: Case) -> None:
    """Raise ValueError naming the first argument or parameter that is excluded at admission."""
    _refuse(case, WITH_PARAMETERS, REQUEST_PREFIX)


def _refuse(case: Case, rows: tuple[Exclusion, ...], prefix: str) -> None:
    for row in rows:
        for name in row.names.split():
            if why := row.meets(case, name):
                raise ValueError(_sentence(case, row, name, prefix, why))


def _sentence(case: Case, row: Exclusion, name: str, prefix: str, why: object) -> str:
    is_argument = name in ARGUMENTS
    if is_argument:
        value = case.given.get(name, getattr(case.asked, name))
    else:
        value = getattr(case.params, name)
    sentence = row.sentence.format(
        name=prefix + name if is_argument else name,
        option=name,
        value=shown(value),
        why=why,
        config=case.config,
        asked=case.asked,
        params=case.params,
    )
    if prefix and is_argument:
        return f"Request argument refused: {sentence}"
    return sentence
