"""Refuse requests for structured output that a canvas cannot honour."""

import math

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname

from dllm_plugin.config.cuda_graphs import CPU_WORKER, GRAMMAR_WORKER, OUR_WORKERS
from dllm_plugin.config.decode import DecodeConfig, RequestConfig
from dllm_plugin.config.request.reporting import EARLY_TEXT, reporting
from dllm_plugin.config.validation import shown

BACKENDS = ("xgrammar", "guidance")  # they can go back, which drafts need
# Parameter -> its neutral value: each of these can contradict a grammar.
CONTRADICTING = {
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": None,
}
# Parameters of a request that no backend of vLLM 0.32 reads.
OF_THE_SERVER = (
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)


def no_grammars(vllm_config: VllmConfig) -> str:
    """Return why an engine refuses every request for structured output; empty if it does not."""
    worker = vllm_config.parallel_config.worker_cls
    if not _is_ours(worker):
        return (
            f"needs a worker that applies grammars, and worker_cls is {worker}: leave it out, or "
            f"derive it from {CPU_WORKER if current_platform.is_cpu() else GRAMMAR_WORKER}"
        )
    settings = vllm_config.structured_outputs_config
    if settings.reasoning_parser and not settings.enable_in_reasoning:
        return (
            f"holds from the first token on, also with reasoning_parser "
            f"{settings.reasoning_parser!r}: start with --structured-outputs-config."
            "enable_in_reasoning, or without a reasoning parser"
        )
    return ""


def _is_ours(worker: str) -> bool:
    """Return whether a worker class is ours, or derived from ours."""
    if worker in OUR_WORKERS:
        return True
    bases = resolve_obj_by_qualname(worker).__mro__
    return any(
        f"{base.__module__}.{base.__qualname__}" in OUR_WORKERS for base in bases
    )


def check_structured_outputs(
    params: SamplingParams, config: DecodeConfig, request: RequestConfig
) -> None:
    """Raise ValueError naming the first value that does not go together with a grammar."""
    asked = params.structured_outputs
    if asked is None or asked.all_constraints_none():
        return
    if config.no_grammars:
        raise ValueError(f"structured_outputs {config.no_grammars}.")
    if asked._backend not in BACKENDS:
        raise ValueError(
            f"structured_outputs needs the backend {' or '.join(BACKENDS)}, which can go back "
            f"when a draft is refused, but this request would get {asked._backend!r}: simplify "
            "the schema or start with --structured-outputs-config.backend guidance."
        )
    for name in OF_THE_SERVER:
        if getattr(asked, name):
            raise ValueError(
                f"structured_outputs {name} {shown(getattr(asked, name))} of a request would be "
                "ignored, for vLLM reads it of --structured-outputs-config alone: leave it out."
            )
    for name, neutral in CONTRADICTING.items():
        value = getattr(params, name)
        if value is not None and value != neutral:
            raise ValueError(
                f"{name} {shown(value)} can contradict the grammar of structured_outputs: leave "
                f"{name} out."
            )
    for token, bias in (params.logit_bias or {}).items():
        if math.isinf(bias):
            raise ValueError(
                f"logit_bias {bias} of token {token} can contradict the grammar of "
                "structured_outputs: use a finite bias."
            )
    if reporting(params.extra_args).early_text:
        raise ValueError(
            f"{EARLY_TEXT} sends tokens before the grammar of structured_outputs has checked them: "
            f"leave {EARLY_TEXT} out."
        )
    if request.use_block_cache:
        raise ValueError(
            "dllm_use_block_cache keeps the KV of drafts that the grammar of structured_outputs "
            "may refuse: turn use_block_cache off."
        )
