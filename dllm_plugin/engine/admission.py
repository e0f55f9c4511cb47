"""Register the checks of requests with vLLM's front end.

A logits processor class has a `validate_params` hook for sampling parameters, and the renderer of
a tokenizer mode sees every prompt as token ids. The checks are in
:mod:`dllm_plugin.config.request.checks` and :mod:`dllm_plugin.config.request.exclusions`.
"""

import copyreg
from contextvars import ContextVar
from functools import cached_property
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.renderers import ChatParams
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from dllm_plugin.config.carriers import TRANSFER
from dllm_plugin.config.decode import Case, DecodeConfig, get_decode_config
from dllm_plugin.config.request.arguments import (
    END_THINK,
    TARGETS,
    TEMPLATE,
    RequestArguments,
)
from dllm_plugin.config.request.checks import (
    PENALTIES,
    check_allowed,
    check_bad_words,
    check_fits,
    check_given_tokens,
    check_moving_tokens,
    check_prompt_length,
    check_prompt_tokens,
    check_sampling_params,
)
from dllm_plugin.config.request.exclusions import refuse_parameters
from dllm_plugin.config.request.parsing import arguments_of, given_arguments
from dllm_plugin.config.request.structured_outputs import check_structured_outputs
from dllm_plugin.config.scheduling import check_pulled_pages

from .grammars.backends import check_readable, choose_guidance

logger = init_logger("vllm.dllm_plugin")


Checked = tuple[RequestArguments, SamplingParams] | None  # of a request
# vLLM checks a request's parameters and, next in the same call, its prompt.
_CHECKED: ContextVar[Checked] = ContextVar("checked", default=None)


class RequestRules(LogitsProcessor):
    """Check the parameters of one engine's requests; never applied to logits."""

    config: DecodeConfig

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError naming the first parameter that cannot be honoured."""
        config, params = cls.config, sampling_params
        check_sampling_params(params, config)
        asked = arguments_of(config, params)
        given = given_arguments(params.extra_args)
        case = Case(config, asked, given, params)
        refuse_parameters(case)
        check_moving_tokens(case)
        choose_guidance(params)
        check_structured_outputs(params)
        check_readable(params)
        _CHECKED.set((asked, params))

    def apply(self, logits: Any, ctx: LogitsContext) -> Any:
        """Raise: our sampler replaces vLLM's, so nobody calls this."""
        raise AssertionError("the diffusion sampler applies no logits processors")


# Defaults that vLLM reads from generation_config.json, besides penalties and a length that vLLM
# refuses at start if no request can have it.
DEFAULTS = ("temperature", "top_k", "top_p", "min_p")
NO_PENALTIES = (
    "The checkpoint's generation_config.json asks for %s, which is not applied: the model's "
    "own decoding has no penalties."
)
WRONG_DEFAULTS = (
    "The checkpoint's generation_config.json asks for %s, which no request can have: vLLM's "
    "defaults apply."
)


def leave_out_defaults(model_config: ModelConfig) -> None:
    """Drop the checkpoint's penalties and wrong values from the defaults of requests.

    The models' own loops apply no penalties; a request may ask for its own. Warns of what is
    dropped.
    """
    if model_config.generation_config == "vllm":
        return
    stored = model_config.try_get_generation_config()
    override = model_config.override_generation_config
    penalties, wrong = [], []
    for name in (*PENALTIES, *DEFAULTS):
        value = stored.get(name)
        if value is None or name in override:
            continue
        if name not in PENALTIES and not _is_possible(name, value):
            wrong.append(f"{name} {value!r}")
        elif name in PENALTIES and value != PENALTIES[name]:
            penalties.append(f"{name} {value}")
        else:
            continue
        override[name] = None
    if penalties:
        logger.warning(NO_PENALTIES, ", ".join(penalties))
    if wrong:
        logger.warning(WRONG_DEFAULTS, ", ".join(wrong))


def _is_possible(parameter: str, value: Any) -> bool:
    """Return whether a request can have a value of a parameter."""
    try:
        SamplingParams(**{parameter: value})
    except (VLLMValidationError, ValueError, TypeError):
        return False
    return True


class _RulesType(type(RequestRules)):  # type: ignore[misc]
    """Create the rule class of an engine, so that pickle rebuilds it from its config."""


def request_rules(config: DecodeConfig) -> Any:
    """Return the rules of one engine as a class, the form in which vLLM takes them."""
    return _RulesType("RequestRules", (RequestRules,), {"config": config})


copyreg.pickle(_RulesType, lambda rules: (request_rules, (rules.config,)))


class DiffusionRenderer(HfRenderer):
    """Render prompts as vLLM does, and refuse those that a diffusion model could not continue.

    is_shut_down  whether vLLM was asked to end, which a dead engine also looks like
    """

    is_shut_down = False

    def shutdown(self) -> None:
        """End as the parent, and remember it."""
        self.is_shut_down = True
        super().shutdown()

    @cached_property
    def decode_config(self) -> DecodeConfig:
        """Return what the engine decodes with."""
        return get_decode_config(self.config)

    def render_messages(
        self, messages: Any, params: ChatParams
    ) -> tuple[list[Any], Any]:
        """Do as the parent, with what the family's templates are given by default."""
        return super().render_messages(messages, self._with_defaults(params))

    async def render_messages_async(
        self, messages: Any, params: ChatParams
    ) -> tuple[list[Any], Any]:
        """Do as the parent, with what the family's templates are given by default."""
        params = self._with_defaults(params)
        return await super().render_messages_async(messages, params)

    def _with_defaults(self, params: ChatParams) -> ChatParams:
        return params.with_defaults(dict(self.decode_config.family.template_defaults))

    def process_for_engine(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as the parent, after a check of the prompt's length."""
        self._check_length(prompt)
        return super().process_for_engine(prompt, *args, **kwargs)

    async def process_for_engine_async(
        self, prompt: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Do as the parent, after a check of the prompt's length."""
        self._check_length(prompt)
        return await super().process_for_engine_async(prompt, *args, **kwargs)

    def _check_length(self, prompt: Any) -> None:
        check_prompt_length(
            len(prompt["prompt_token_ids"]), self.model_config.max_model_len
        )

    def render_completion_suffix(self, prompt: str, suffix: str) -> str | None:
        """Raise VLLMValidationError: our endpoints render a suffix before vLLM would ask."""
        raise VLLMValidationError(
            "suffix is served by the endpoints of DiffuPlug: use diffuplug serve, or name "
            "diffuplug_api in VLLM_PLUGINS."
        )

    def validate_token_ids(self, token_ids: Any, *args: Any, **kwargs: Any) -> None:
        """Raise VLLMValidationError for prompts with the mask token, or without room to run."""
        super().validate_token_ids(token_ids, *args, **kwargs)
        config = self.decode_config
        check_prompt_tokens(
            token_ids,
            config.mask_token_id,
            config.hidden_token_id,
            config.structure_token_ids,
        )
        checked = _CHECKED.get()
        _CHECKED.set(None)
        # Other callers name the parameter that holds the ids, and have checked no request.
        if checked is None or kwargs.get("parameter") is not None:
            return
        asked, params = checked
        vocab_size = self.model_config.get_vocab_size()
        if asked.template is not None:
            check_given_tokens(TEMPLATE, asked.template.token_ids, vocab_size)
        check_given_tokens(TARGETS, asked.targets or (0,), vocab_size)
        _check_thinking(asked, params, config.mask_token_id, vocab_size)
        check_fits(self.config, config, asked, len(token_ids), params.max_tokens)
        pulled = (params.extra_args or {}).get(TRANSFER)
        if pulled is not None:
            check_pulled_pages(self.config, pulled, len(token_ids))
        if params.bad_words or params.allowed_token_ids:
            self._check_choices(params.clone())

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        return dict(self.model_config.try_get_generation_config())

    def _check_choices(self, params: SamplingParams) -> None:
        """Refuse words and allowed ids by their tokens, which vLLM knows after its last hook."""
        tokenizer: Any = self.tokenizer
        if params.bad_words and tokenizer is None:
            raise VLLMValidationError(
                "bad_words needs a tokenizer, and skip_tokenizer_init is set: leave one of them "
                "out.",
                parameter="bad_words",
            )
        params.update_from_tokenizer(tokenizer)
        check_bad_words(params.bad_words_token_ids or [])
        if params.allowed_token_ids:
            eos = None if tokenizer is None else tokenizer.eos_token_id
            params.update_from_generation_config(self._generation_config, eos)
            check_allowed(params, self.decode_config.mask_token_id)


def _check_thinking(
    asked: RequestArguments, params: SamplingParams, mask_id: int, vocab_size: int
) -> None:
    """Raise VLLMValidationError for an end of thinking that no text can have."""
    token = asked.end_think_token_id
    if token is None:
        return
    check_given_tokens(END_THINK, (token,), vocab_size)
    if token == mask_id:
        raise VLLMValidationError(
            f"{END_THINK} {token} is the mask token, which no text has.",
            parameter=END_THINK,
        )
    if params.logprobs is not None:
        raise VLLMValidationError(
            f"logprobs cannot be combined with {END_THINK}, which is written without a "
            "probability: leave one of them out.",
            parameter="logprobs",
        )
