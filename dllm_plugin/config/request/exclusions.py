"""Refuse what the engine, another argument or a parameter of vLLM's excludes.

Every function yields its reasons in the order in which they are checked; the first is raised.
"""

from collections.abc import Iterator
from itertools import chain

from dllm_plugin.config.decode import Case
from dllm_plugin.config.options import FILL, REQUEST_FIELDS, REQUEST_PREFIX
from dllm_plugin.config.validation import shown
from dllm_plugin.decoding.policies import SEVERAL_BLOCKS

from .arguments import ARGUMENTS, AUTOMATON, end_of_gaps, refuse_names
from .checks import PENALTIES, beside_stages, no_template, too_long, too_many_forwards
from .structured_outputs import no_automaton

OF_SEVERAL_BLOCKS = SEVERAL_BLOCKS[1:]
BESIDE_TARGETS = (
    *("n", "stop", "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids"),
    *("logit_bias", *PENALTIES),
)


def _without_effect(case: Case) -> Iterator[str]:
    """Yield why the engine, the strategy or the policy reads no such argument."""
    config = case.config
    asked = case.asked
    given = case.given
    if asked.block_length > config.longest_block:
        name = "window" if "window" in given else "block_length"
        value = shown(given.get(name, asked.block_length))
        yield (
            f"dllm_{name} {value} is longer than the canvas of {config.longest_block} positions: "
            f"lower dllm_{name} or raise canvas_length in additional_config."
        )
    blocks = given.get("max_active_blocks", 1)
    if blocks > config.max_active_blocks:
        yield (
            f"dllm_max_active_blocks {shown(blocks)} exceeds the engine's "
            f"{config.max_active_blocks}: raise max_active_blocks in additional_config."
        )
    if "schedule" in given and not config.method.floats:
        yield (
            "dllm_schedule has no effect with adaptive 'off': leave it out, or start with adaptive "
            "'throughput' or 'balanced', which d2f and block_diffusion have."
        )
    for name in ("template", "targets"):
        if name in given and (why := no_template(config, f"dllm_{name}")):
            yield why
    for name in ARGUMENTS:
        if name in given and not _is_read(case, name):
            yield (
                f"dllm_{name} has no effect with strategy {config.strategy!r} and policy "
                f"{asked.policy!r} on {config.architecture}: remove it or choose another policy."
            )
    if config.method.floats and asked.block_length != config.block_length:
        yield (
            f"dllm_block_length has no effect with adaptive {config.adaptive!r}, whose windows "
            "dllm_schedule sets: remove it."
        )


def _is_read(case: Case, name: str) -> bool:
    """Return whether strategy and policy read a given argument, or it is off."""
    known = ARGUMENTS[name]
    method = case.config.method
    if case.given[name] in known.off:
        return True
    if name in REQUEST_FIELDS:
        return name in method.options_read(case.asked.policy)
    return not known.needs or bool(getattr(method, known.needs))


def _with_gaps(case: Case) -> Iterator[str]:
    """Yield why a schedule, a template or its targets are refused."""
    config = case.config
    asked = case.asked
    given = case.given
    for place, width in enumerate(given.get("schedule", ())):
        if type(width) is not int or not 1 <= width <= config.canvas_length:
            yield (
                f"dllm_schedule must hold whole numbers between 1 and canvas_length "
                f"{config.canvas_length}, got {shown(width)} at place {place}."
            )
    template = given.get("template", (FILL,))
    targets = given.get("targets", ())
    mask = f"the mask token (id {config.mask_token_id})"
    if "template" in given and (why := too_long(config, end_of_gaps(template))):
        yield why
    if FILL not in template:
        yield "dllm_template holds no position to fill (-1)."
    if config.mask_token_id in template:
        yield f"dllm_template holds {mask}: write -1 for a position to fill."
    if "targets" in given and "template" not in given:
        yield "dllm_targets needs dllm_template, whose positions to fill (-1) they are for."
    if "targets" in given and len(targets) != template.count(FILL):
        yield (
            f"dllm_targets holds {len(targets)} tokens, but dllm_template has "
            f"{template.count(FILL)} positions to fill (-1): they must be as many."
        )
    if config.mask_token_id in targets:
        yield f"dllm_targets holds {mask}, which no position takes."
    if asked.template and asked.cfg_scale > 0:
        yield "dllm_cfg_scale cannot be combined with dllm_template."
    if asked.template and given.get("suffix_window") is not None:
        yield "dllm_suffix_window cannot be combined with dllm_template, which is seen whole."
    if asked.targets and asked.add_eos_at_end:
        yield (
            "dllm_add_eos_at_end has no effect with dllm_targets, which reserve no position: "
            "leave it out."
        )
    for name in REQUEST_FIELDS:
        if asked.targets and name in given:
            yield (
                f"'dllm_{name}' has no effect with dllm_targets, which one forward takes: leave "
                "it out."
            )


def _with_others(case: Case) -> Iterator[str]:
    """Yield why an argument is refused beside another argument or an option."""
    config = case.config
    asked = case.asked
    given = case.given
    for name in ("steps", "max_post_steps"):
        if why := too_many_forwards(case, name):
            yield (
                f"dllm_{name} {shown(given[name])} exceeds {why}: lower {name} or raise it in "
                "additional_config."
            )
    if given.get("refresh_before") is not None and asked.full_refresh_every == 1:
        yield (
            "dllm_refresh_before has no effect with full_refresh_every 1: remove it or raise "
            "full_refresh_every."
        )
    if asked.has_half_a_budget:
        yield "max_thinking_tokens and end_think_token_id need each other: give both or none."
    if config.method.causal and asked.early_text:
        yield f"dllm_early_text is not supported on {config.architecture}: leave it out."
    if asked.trace and config.no_traces:
        yield f"dllm_trace {config.no_traces}."
    if asked.early_text and case.edits:
        yield (
            f"dllm_early_text cannot be combined with policy {asked.policy}, which may still "
            "replace tokens of an open block."
        )


def _with_options(case: Case, prefix: str) -> Iterator[str]:
    """Yield why an option of the engine, or the argument with a prefix, is refused."""
    config = case.config
    asked = case.asked
    given = case.given
    for name in ("cfg_scale", "use_block_cache", "early_text"):
        if why := beside_stages(case, name):
            yield f"{prefix}{name} {why}."
    if 0 < (given.get("steps") or 0) < config.method.least_steps:
        yield (
            f"{prefix}steps must be at least {config.method.least_steps}, got {given['steps']}: "
            "the first step of a block decides one position."
        )
    for name in OF_SEVERAL_BLOCKS:
        one = config.method.next_block and asked.max_active_blocks == 1
        if one and name in given:
            yield (
                f"{prefix}{name} has no effect with max_active_blocks 1: remove it or raise "
                "max_active_blocks."
            )
    if asked.use_block_cache and not config.dedicated_commit:
        yield (
            f"{prefix}use_block_cache needs max_active_blocks 1, got {config.max_active_blocks}: "
            "the cache of a block is that of one block at a time."
        )
    if asked.use_block_cache and config.kv_cache_layout == "distinct":
        yield (
            f"{prefix}use_block_cache needs kv_cache_layout 'unified': the attention of 'distinct' "
            "reads the canvas's keys from the same forward, not from the cache."
        )
    if config.family.logits_shift and asked.refresh_before == 0:
        yield (
            f"{prefix}refresh_before must be at least 1 on {config.architecture}, got 0: the row "
            "of the position before a block predicts its first token."
        )


def _with_parameters(case: Case) -> Iterator[str]:
    """Yield why an argument and a parameter of vLLM's are refused together."""
    config = case.config
    asked = case.asked
    given = case.given
    params = case.params
    for name in ("top_p", "top_k"):
        if name in given and params.temperature > 0:
            yield (
                f"dllm_{name} filters greedy requests: with temperature {params.temperature} use "
                f"{name}."
            )
    if "entropy_temperature" in given and params.temperature > 0:
        yield (
            f"dllm_entropy_temperature is for greedy requests: with temperature "
            f"{params.temperature} the entropies are read at that, so leave it out."
        )
    if config.reserved and "template" not in given and params.max_tokens == 1:
        yield "max_tokens must be at least 2 with this model, whose last position is reserved."
    template = asked.template
    stops = params.stop_token_ids or ()
    if template and template.end != params.max_tokens:
        yield (
            f"max_tokens is {shown(params.max_tokens)}, but the last gap of dllm_template ends at "
            f"{template.end}: they must be equal."
        )
    for name in ("stop", "stop_token_ids"):
        if template and len(template.gaps) > 1 and case.is_set(name):
            yield f"{name} needs a single gap, got {len(template.gaps)}."
    if template and stops and len(template.ends(stops)) < len(stops):
        yield (
            "dllm_template gives a token of stop_token_ids in front of its gap: put it into the "
            "prompt, or leave it out of stop_token_ids."
        )
    if asked.targets and params.logprobs is None:
        yield "dllm_targets needs logprobs: the answer says nothing else."
    if asked.targets and not params.ignore_eos:
        yield "dllm_targets needs ignore_eos: a target may be what ends a text."
    for name in BESIDE_TARGETS:
        if asked.targets and case.is_set(name):
            yield f"{name} cannot be combined with dllm_targets: leave it out."


def _with_grammar(case: Case) -> Iterator[str]:
    """Yield why a request with structured output is refused."""
    asked = case.asked
    words = "can contradict the grammar of structured_outputs: leave"
    if case.config.no_grammars:
        yield f"structured_outputs {case.config.no_grammars}."
    if asked.add_eos_at_end:
        yield (
            "dllm_add_eos_at_end has no effect with structured_outputs, which reserves no "
            "position: leave it out."
        )
    if asked.template:
        yield "structured_outputs cannot be combined with dllm_template."
    for name in ("max_thinking_tokens", "end_think_token_id"):
        if getattr(asked, name) is not None:
            yield f"dllm_{name} {words} dllm_{name} out."
    for name in ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids"):
        if case.is_set(name):
            yield f"{name} {shown(getattr(case.params, name))} {words} {name} out."
    if asked.early_text:
        yield (
            "dllm_early_text sends tokens before the grammar of structured_outputs has checked "
            "them: leave dllm_early_text out."
        )
    if asked.use_block_cache:
        yield (
            "dllm_use_block_cache keeps the KV of drafts that the grammar of structured_outputs "
            "may refuse: turn use_block_cache off."
        )
    if asked.grammar == AUTOMATON:
        why = no_automaton(case.params, asked, case.config)
        if why:
            yield f"dllm_grammar 'automaton' cannot be honoured: {why}."


def refuse_options(case: Case) -> None:
    """Raise ValueError naming the first of the engine's options that is excluded."""
    method = case.config.method
    unread = [name for name in REQUEST_FIELDS if name not in method.options]
    refuse_names(case.given, unread, method.strategy, case.config.architecture)
    for sentence in _with_options(case, ""):
        raise ValueError(sentence)


def refuse_arguments(case: Case) -> None:
    """Raise ValueError naming the first argument that is excluded before admission."""
    alone = chain(_without_effect(case), _with_gaps(case), _with_others(case))
    for sentence in chain(alone, _with_options(case, REQUEST_PREFIX)):
        raise ValueError(f"Request argument refused: {sentence}")


def refuse_parameters(case: Case) -> None:
    """Raise ValueError naming the first argument or parameter that is excluded at admission."""
    found = _with_parameters(case)
    if case.has_grammar:
        found = chain(found, _with_grammar(case))
    elif "grammar" in case.given:
        useless = "dllm_grammar has no effect without structured_outputs: leave it out."
        found = chain(found, [useless])
    for sentence in found:
        if sentence.startswith(REQUEST_PREFIX):
            sentence = f"Request argument refused: {sentence}"
        raise ValueError(sentence)
