"""What a request may ask for: checked in the front end, before anything runs.

vLLM's two doors: a logits processor class has a `validate_params` hook for sampling parameters,
and the renderer of a tokenizer mode sees every prompt as token ids.
"""

import copyreg
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from dllm_plugin.config import DecodeConfig, get_decode_config

# Parameter -> neutral value, and why diffusion decoding refuses anything else.
REFUSED: dict[str, tuple[Any, str]] = {
    "presence_penalty": (0.0, "penalties count tokens in order of generation"),
    "frequency_penalty": (0.0, "penalties count tokens in order of generation"),
    "repetition_penalty": (1.0, "penalties count tokens in order of generation"),
    "structured_outputs": (None, "a grammar needs tokens from left to right"),
    "prompt_logprobs": (None, "a bidirectional prompt predicts no next token"),
    "prompt_logprob_token_ids": (None, "a bidirectional prompt predicts no next token"),
    "prompt_logprob_start": (None, "a bidirectional prompt predicts no next token"),
    "logprob_token_ids": (None, "only top log-probabilities are kept per position"),
    "thinking_token_budget": (None, "thinking is not counted from left to right"),
    "repetition_detection": (None, "repetition is not detected out of order"),
    "trace_decode_token_ids": (None, "tokens are not decoded in order"),
}


MAX_STOP_TOKENS = 128
MAX_BAD_WORD = 64


def _check_limits(params: SamplingParams) -> None:
    """Refuse what one request could slow the whole batch down with."""
    if len(params.stop_token_ids or ()) > MAX_STOP_TOKENS:
        raise ValueError(
            f"stop_token_ids holds {len(params.stop_token_ids or ())} ids; at most "
            f"{MAX_STOP_TOKENS} are supported."
        )
    longest = max(map(len, params.bad_words or ()), default=0)
    if longest > MAX_BAD_WORD:
        raise ValueError(
            f"bad_words holds a word of {longest} characters; at most {MAX_BAD_WORD} are supported."
        )
    # With n > 1 vLLM counts the seed up, and its own storage is 64 bits wide.
    if params.seed is not None and not -(2**63) <= params.seed <= 2**63 - params.n:
        raise ValueError(f"seed must lie in [-2**63, 2**63 - n], got {params.seed}.")


def _check_choices(params: SamplingParams, mask_token_id: int) -> None:
    """Refuse token rules that leave a position nothing to choose."""
    if not params.allowed_token_ids:
        return
    allowed = set(params.allowed_token_ids) - {mask_token_id}
    if not allowed:
        raise ValueError("allowed_token_ids leaves no token to choose beside the mask token.")
    if params.min_tokens and not allowed - set(params.stop_token_ids or ()):
        raise ValueError(
            "min_tokens cannot be reached: allowed_token_ids holds nothing but stop tokens."
        )


class RequestRules(LogitsProcessor):
    """Per-request rules of one engine; never applied to logits (see :mod:`sampler`)."""

    config: DecodeConfig

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError naming the first parameter that cannot be honoured."""
        for name, (neutral, reason) in REFUSED.items():
            value = getattr(sampling_params, name)
            if value is not None and value != neutral:
                raise ValueError(f"{name} is not supported by diffusion decoding: {reason}.")
        cls.config.for_request(sampling_params.extra_args)
        _check_limits(sampling_params)
        _check_choices(sampling_params, cls.config.mask_token_id)

    def apply(self, logits: Any, ctx: LogitsContext) -> Any:
        """Unused: our sampler replaces vLLM's."""
        raise AssertionError("the diffusion sampler applies no logits processors")


class _RulesType(type(RequestRules)):  # type: ignore[misc]
    """Type of per-engine rule classes, so that pickle rebuilds them from their config."""


def request_rules(config: DecodeConfig) -> Any:
    """The rules of one engine as a class, the form in which vLLM takes them."""
    return _RulesType("RequestRules", (RequestRules,), {"config": config})


def _rebuild(rules: Any) -> tuple[Any, ...]:
    return request_rules, (rules.config,)


copyreg.pickle(_RulesType, _rebuild)


class DiffusionRenderer(HfRenderer):
    """vLLM's renderer, refusing prompts that a diffusion model could not continue."""

    def process_for_engine(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """As the parent's, after a check of the prompt's length."""
        self._check_length(prompt)
        return super().process_for_engine(prompt, *args, **kwargs)

    async def process_for_engine_async(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """As the parent's, after a check of the prompt's length."""
        self._check_length(prompt)
        return await super().process_for_engine_async(prompt, *args, **kwargs)

    def _check_length(self, prompt: Any) -> None:
        """Raise VLLMValidationError for a prompt that leaves no room in the context."""
        length, context = len(prompt["prompt_token_ids"]), self.model_config.max_model_len
        # vLLM would blame max_tokens, which it has lowered to 0 by then.
        if length >= context:
            raise VLLMValidationError(
                f"The prompt has {length} tokens, but the context of {context} tokens must hold "
                "the prompt and at least one new token: shorten the prompt or raise "
                "max_model_len.",
                parameter="prompt",
            )

    def validate_token_ids(self, token_ids: Any, *args: Any, **kwargs: Any) -> None:
        """Raise VLLMValidationError for a prompt that holds the mask token."""
        super().validate_token_ids(token_ids, *args, **kwargs)
        mask_token_id = get_decode_config(self.config).mask_token_id
        if mask_token_id in token_ids:
            raise VLLMValidationError(
                f"The prompt contains the mask token (id {mask_token_id}), which marks the "
                "positions to generate: remove it from the prompt.",
                parameter="prompt",
            )
