"""Refuse prompts and sampling parameters that diffusion decoding cannot honour.

vLLM calls them in its front end, by the hooks of :mod:`dllm_plugin.engine.admission`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import Case, DecodeConfig
from dllm_plugin.config.scheduling import shares_pages
from dllm_plugin.config.validation import shown
from dllm_plugin.decoding.families import no_gaps

from .arguments import MAX_WORD_TOKENS, MAX_WORDS_TOKENS, TEMPLATE, RequestArguments

# Penalties, with the value that penalises nothing.
PENALTIES = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# Parameter -> neutral value, and why diffusion decoding refuses anything else.
REFUSED: dict[str, tuple[Any, str]] = {
    "prompt_logprob_token_ids": (None, "rows of prompts do not become logits"),
    "prompt_logprob_start": (None, "rows of prompts do not become logits"),
    "logprob_token_ids": (None, "only top log-probabilities are kept per position"),
    "thinking_token_budget": (None, "vLLM's sampler counts it, and is replaced"),
    "repetition_detection": (None, "repeated tokens do not end a text"),
    "trace_decode_token_ids": (None, "tokens are not decoded in order"),
}

FORWARDS_PER_POSITION = 4  # of a block that a request may ask for: more only use a slot
FORWARDS = 64  # that it may ask for however short its blocks are
OF_POSITIONS = ("min_tokens", "bad_words")
MAX_STOP_TOKENS = 128
MAX_BAD_WORD = 64


def check_sampling_params(params: SamplingParams, config: DecodeConfig) -> None:
    """Raise ValueError naming the first of vLLM's parameters that cannot be honoured."""
    refused = dict(REFUSED)
    if config.no_prompt_logprobs:
        refused = {"prompt_logprobs": (None, config.no_prompt_logprobs), **REFUSED}
    for name, (neutral, reason) in refused.items():
        value = getattr(params, name)
        if value is not None and value != neutral:
            raise ValueError(
                f"{name} is not supported by diffusion decoding: {reason}. Leave it at {neutral}, "
                f"got {shown(value)}."
            )
    _check_text(params)
    _check_beams(params)
    _check_limits(params)
    _check_choices(params, config.mask_token_id)


def check_moving_tokens(case: Case) -> None:
    """Raise ValueError for what a request asks of positions whose tokens move."""
    config, asked = case.config, case.asked
    if not config.moves_tokens:
        return
    for name in OF_POSITIONS:
        if case.is_set(name):
            raise ValueError(f"{name} {config.moves_tokens}: leave it out.")
    allowed = set(case.params.allowed_token_ids or ())
    if allowed and allowed <= {config.mask_token_id, *config.structure_token_ids}:
        raise ValueError(
            "allowed_token_ids leaves nothing to write but tokens that delete and insert."
        )
    if asked.block_length != config.block_length:
        raise ValueError(
            f"dllm_block_length {asked.block_length} is not the {config.block_length} of "
            f"{config.family.title}, whose blocks share experts: leave it out."
        )


def _check_text(params: SamplingParams) -> None:
    """Refuse half a surrogate pair: vLLM sends requests to its engine as UTF-8, which has none."""
    for name in ("stop", "bad_words", "extra_args"):
        for leaf in leaves_of(getattr(params, name)):
            if isinstance(leaf, str):
                check_characters(name, leaf)


def check_characters(name: str, text: str) -> None:
    """Raise ValueError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = shown(text[error.start])
        raise ValueError(
            f"{name} holds {half} in {shown(text)}, half of a surrogate pair, which UTF-8 "
            "cannot carry: send whole characters."
        ) from None


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield every value within lists and dictionaries, keys too."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if not isinstance(value, (dict, list, tuple)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            pending += [*value, *value.values()] if isinstance(value, dict) else value


def _check_beams(params: SamplingParams) -> None:
    """Refuse what vLLM's beam search asks for at each token, over HTTP and offline.

    Its own parameters come to no hook; no caller but it forbids watermarks of one token.
    """
    asked = (params.max_tokens, params.detokenize, params.watermarking)
    if asked == (1, False, False) and (params.logprobs or 0) >= 2:
        raise ValueError(
            "use_beam_search is not supported by diffusion decoding: beams grow from left to "
            "right, a token at a time."
        )


def _check_limits(params: SamplingParams) -> None:
    """Refuse what one request could slow the whole batch down with."""
    stops = len(params.stop_token_ids or ())
    if stops > MAX_STOP_TOKENS:
        raise ValueError(
            f"stop_token_ids holds {stops} ids; at most {MAX_STOP_TOKENS} are supported."
        )
    longest = max(map(len, params.bad_words or ()), default=0)
    if longest > MAX_BAD_WORD:
        raise ValueError(
            f"bad_words holds a word of {longest} characters; at most {MAX_BAD_WORD} are supported."
        )
    # With n > 1 vLLM counts the seed up, and its own storage is 64 bits wide.
    if params.seed is not None and not -(2**63) <= params.seed <= 2**63 - params.n:
        raise ValueError(
            f"seed must lie in [-2**63, 2**63 - n], got {shown(params.seed)}."
        )
    # vLLM's messages to its engine hold 64 bits; other integers are bounded elsewhere.
    if params.top_k >= 2**63:
        raise ValueError(f"top_k must be at most 2**63 - 1, got {shown(params.top_k)}.")
    asked = params.structured_outputs
    numbers = {
        "stream_interval": params.stream_interval,
        "structured_outputs": asked and asked.json,
    }
    for name, value in numbers.items():
        for leaf in leaves_of(value):
            if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
                raise ValueError(f"{name} must fit in 64 bits, got {shown(leaf)}.")


def check_bad_words(words: Sequence[Sequence[int]]) -> None:
    """Refuse words of more tokens than the tables and the steps are made for."""
    several = [len(word) for word in words if len(word) > 1]
    longest = max(several, default=0)
    if longest > MAX_WORD_TOKENS:
        raise VLLMValidationError(
            f"bad_words holds a word of {longest} tokens; at most {MAX_WORD_TOKENS} are supported: "
            "ban a shorter part of it.",
            parameter="bad_words",
        )
    if len(several) * longest > MAX_WORDS_TOKENS:
        raise VLLMValidationError(
            f"bad_words holds {len(several)} words of up to {longest} tokens, with and without a "
            f"space in front; words times tokens of the longest may be {MAX_WORDS_TOKENS} at most: "
            "ban fewer or shorter words.",
            parameter="bad_words",
        )


def _check_choices(params: SamplingParams, mask_token_id: int) -> None:
    """Refuse token rules that leave a position nothing to choose."""
    if not params.allowed_token_ids:
        return
    allowed = set(params.allowed_token_ids) - {mask_token_id}
    if not allowed:
        raise ValueError(
            "allowed_token_ids leaves no token to choose but the mask token."
        )
    if params.min_tokens and not allowed - set(params.stop_token_ids or ()):
        raise ValueError(
            "min_tokens cannot be reached: allowed_token_ids holds nothing but stop tokens."
        )


def check_allowed(params: SamplingParams, mask_token_id: int) -> None:
    """Refuse allowed ids of which the tokens of words, or all that ends a text, leave none."""
    banned = {word[0] for word in params.bad_words_token_ids or [] if len(word) == 1}
    left = set(params.allowed_token_ids or ()) - {mask_token_id} - banned
    if not left:
        raise VLLMValidationError(
            "bad_words bans every token of allowed_token_ids: leave one of them.",
            parameter="bad_words",
        )
    if params.min_tokens and not left - params.all_stop_token_ids:
        raise VLLMValidationError(
            f"min_tokens {params.min_tokens} cannot be reached: allowed_token_ids leaves nothing "
            "but tokens that end a text.",
            parameter="min_tokens",
        )


def check_prompt_length(length: int, context: int) -> None:
    """Raise VLLMValidationError for a prompt that leaves no room in the context."""
    # vLLM would blame max_tokens, which it has lowered to 0 by then.
    if length >= context:
        raise VLLMValidationError(
            f"The prompt has {length} tokens, but the context of {context} tokens must hold "
            "the prompt and at least one new token: shorten the prompt or raise "
            "max_model_len.",
            parameter="prompt",
        )


def check_prompt_tokens(
    token_ids: Any,
    mask_token_id: int,
    hidden_token_id: int | None = None,
    structure_token_ids: Sequence[int] = (),
) -> None:
    """Raise VLLMValidationError for a prompt with a token that prompts must not hold."""
    named = dict.fromkeys(
        structure_token_ids,
        "the token {}, by which this model deletes or inserts tokens while it decodes",
    )
    if hidden_token_id is not None:
        named[hidden_token_id] = (
            "the pad token (id {}), which this model's own code hides from all later blocks, "
            "and DiffuPlug does not"
        )
    named[mask_token_id] = (
        "the mask token (id {}), which marks the positions to generate"
    )
    for token, words in named.items():
        if token in token_ids:
            found = words.format(token)
            raise VLLMValidationError(
                f"The prompt contains {found}: remove it from the prompt.",
                parameter="prompt",
            )


def check_given_tokens(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise VLLMValidationError for an argument with a token that the model does not have."""
    if (highest := max(token_ids)) >= vocab_size:
        raise VLLMValidationError(
            f"{name} holds the token id {highest}, but the vocabulary has {vocab_size} tokens.",
            parameter=name,
        )


def no_template(config: DecodeConfig, wanted: str) -> str:
    """Return why an engine cannot serve what is `wanted`; empty if it can."""
    return no_gaps(wanted, config.strategy, config.family)


def too_long(config: DecodeConfig, num_positions: int) -> str:
    """Return why gaps and the text between them do not fit a canvas; empty if they do."""
    if num_positions <= config.canvas_length:
        return ""
    return (
        f"The gaps and the text between them take {num_positions} positions, canvas_length is "
        f"{config.canvas_length}: shorten them, or start the server with a larger canvas_length."
    )


def beside_stages(case: Case, name: str) -> str:
    """Return why stages of a pipeline refuse an argument; empty if they do not."""
    restarts = name != "early_text" or case.config.method.full_attention
    if case.config.stages == 1 or not (restarts and getattr(case.asked, name)):
        return ""
    return f"is not supported by pipeline_parallel_size {case.config.stages}"


def too_many_forwards(case: Case, name: str) -> str:
    """Return the limit that a request's forwards of a block exceed; empty if they do not."""
    config = case.config
    block = case.asked.block_length
    if "block_length" not in case.given:
        block = max(block, config.block_length)
    engines = config.defaults.max_post_steps
    if name == "steps":
        engines = config.steps or 0
    most = max(FORWARDS_PER_POSITION * block, FORWARDS, engines)
    if (case.given.get(name) or 0) <= most:
        return ""
    return (
        f"{most}, the largest of {FORWARDS}, {FORWARDS_PER_POSITION} for each of the block's "
        f"{block} positions and the engine's own {engines}"
    )


def check_length(config: DecodeConfig, num_positions: int) -> None:
    """Raise ValueError if gaps and the text between them do not fit a canvas."""
    if refusal := too_long(config, num_positions):
        raise ValueError(refusal)


def check_fits(
    vllm_config: VllmConfig,
    config: DecodeConfig,
    request: RequestArguments,
    prompt_len: int,
    max_tokens: int | None,
) -> None:
    """Raise VLLMValidationError if a forward of the request could never be scheduled."""
    if not config.method.full_attention:
        if not (config.method.splits_prompt or config.method.causal):
            cache = vllm_config.cache_config
            if shares_pages(vllm_config) and cache.block_size % request.block_length:
                raise VLLMValidationError(
                    f"dllm_block_length {request.block_length} does not divide a page of "
                    f"{cache.block_size} tokens, so prefix caching would not be exact: choose "
                    "another length or start with --no-enable-prefix-caching.",
                    parameter="dllm_block_length",
                )
        return
    context = vllm_config.model_config.max_model_len
    if request.template is not None:
        template_length = len(request.template.token_ids)
        # Without a template of the user a reserved position is no template.
        name = "max_tokens" if request.template.ends_given else TEMPLATE
        if prompt_len + template_length > context:
            raise VLLMValidationError(
                f"The prompt has {prompt_len} tokens and {name} {template_length} positions, "
                f"but the context holds {context}: shorten one of them or raise max_model_len.",
                parameter=name,
            )
        _check_room(vllm_config, prompt_len + template_length, 1)
        return
    end = context if max_tokens is None else min(prompt_len + max_tokens, context)
    # As if the whole answer were one canvas: the last canvas is computed with all of it.
    blocks = -(-(end - prompt_len) // request.block_length)
    positions = min(prompt_len + blocks * request.block_length, context)
    _check_room(vllm_config, positions, 2 if request.cfg_scale > 0 else 1)


def _check_room(vllm_config: VllmConfig, positions: int, copies: int) -> None:
    """Raise VLLMValidationError if a refresh fits neither the step's budget nor the KV cache."""
    scheduler = vllm_config.scheduler_config
    cache = vllm_config.cache_config
    guided = " twice, since cfg_scale is set," if copies == 2 else ""
    shorter = "shorten the prompt, lower max_tokens or raise"
    if copies > scheduler.max_num_seqs:
        raise VLLMValidationError(
            f"cfg_scale needs two of max_num_seqs {scheduler.max_num_seqs}: raise "
            "max_num_seqs or leave cfg_scale at 0.",
            parameter="dllm_cfg_scale",
        )
    budget = scheduler.max_num_batched_tokens
    if positions * copies > budget:
        raise VLLMValidationError(
            f"A step of this request computes prompt and answer, {positions} positions,"
            f"{guided} at once, but max_num_batched_tokens is {budget}: {shorter} "
            "max_num_batched_tokens.",
            parameter="max_tokens",
        )
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size
    if parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    # One page is vLLM's own; the number is unknown until the engine is up.
    total = (cache.num_gpu_blocks or 0) // engines
    # vLLM keeps these pages free when it admits a request while others run, which is always so for
    # the unconditional one.
    kept = int(scheduler.watermark * total) if copies == 2 else 0
    pages = max(total - 1 - kept, 0)
    needed = copies * -(-positions // cache.block_size)
    if total and pages < needed:
        raise VLLMValidationError(
            f"This request needs {needed} pages of {cache.block_size} tokens of KV cache for "
            f"{positions} positions{guided.rstrip(',')}, but there are {pages}: {shorter} the "
            "KV cache (kv_cache_memory_bytes or gpu_memory_utilization).",
            parameter="max_tokens",
        )
