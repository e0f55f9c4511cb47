"""Set vLLM's scheduler and prefix cache, and refuse options that diffusion decoding lacks.

Refused are also adapters of requests beside a merged adapter.
"""

from importlib.util import find_spec
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .carriers import TRANSFER, wrong_pages
from .decode import TOKENIZER_MODE, DecodeConfig
from .memory import is_small_card, usable_bytes
from .request.structured_outputs import is_ours

logger = init_logger("vllm.dllm_plugin")

MAX_LOGPROBS = 100
CONCURRENT_CANVASES = 64
SMALL_CARD_REQUESTS, SMALL_CARD_TOKENS = 16, 2048  # of a step
# Tokens; CPU attention needs 32, GPUs a multiple of their default of 16.
PAGE = 32
SCHEDULERS = {
    "canvas": "dllm_plugin.engine.scheduling.scheduler.DiffusionScheduler",
    "refresh": "dllm_plugin.engine.scheduling.refresh_scheduler.RefreshScheduler",
    "floating": "dllm_plugin.engine.scheduling.adaptive_scheduler.AdaptiveScheduler",
    "drafts": "dllm_plugin.engine.scheduling.load_scheduler.DraftScheduler",
}


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ValueError for the first option of vLLM that diffusion decoding does not support."""
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    reasons = {
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
        "enable_dbo": parallel.enable_dbo,
        "enable_batch_sharded_sampling": parallel.enable_batch_sharded_sampling,
        "speculative_config": vllm_config.speculative_config is not None,
        "watermark_config": vllm_config.watermark_config is not None,
        "logits_processors": bool(model_config.logits_processors),
        "enable_prompt_embeds": model_config.enable_prompt_embeds,
        "logprobs_mode": model_config.logprobs_mode != "raw_logprobs",
        "return_sampling_mask": model_config.return_sampling_mask,
        "enable_trace_replay": model_config.enable_trace_replay,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold > 0,
        "scheduler_cls": scheduler.scheduler_cls is not None,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens is not None,
        "tokenizer_mode": model_config.tokenizer_mode
        not in ("auto", "hf", TOKENIZER_MODE),
        "runner": model_config.runner_type != "generate",
    }
    for option, is_set in reasons.items():
        if is_set:
            raise ValueError(
                f"{option} as given cannot be combined with diffusion decoding: leave it at its "
                "default."
            )
    if not 0 <= model_config.max_logprobs <= MAX_LOGPROBS:
        raise ValueError(
            f"max_logprobs must be from 0 to {MAX_LOGPROBS} with diffusion decoding, got "
            f"{model_config.max_logprobs}."
        )


IN_PLACE = (
    "load_inplace would read the adapter again in every step: unload it, and load it."
)
# The first moves whole pages, keyed by the hashes of the prefix cache; the second moves all
# pages of a prompt, of which the engine that decodes computes the last block again.
CONNECTORS = ("OffloadingConnector", "NixlConnector")
# vLLM's specs for the first connector.
GPU_SPECS = (
    "CPUOffloadingSpec",  # if none is named
    "TieringOffloadingSpec",
)


def connector_of(vllm_config: VllmConfig) -> str | None:
    """Return the name of vLLM's connector for pages of the KV cache; None without a connector."""
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    if cache.kv_offloading_size is not None:  # becomes a connector after our hook
        if cache.kv_offloading_backend == "lmcache":
            return "LMCacheMPConnector"
        simple = envs.VLLM_USE_SIMPLE_KV_OFFLOAD
        return "SimpleCPUOffloadConnector" if simple else CONNECTORS[0]
    return None if transfer is None else transfer.kv_connector


def shares_pages(vllm_config: VllmConfig) -> bool:
    """Return whether a request may find pages of another request, here or by a connector."""
    cached = vllm_config.cache_config.enable_prefix_caching
    return cached or connector_of(vllm_config) is not None


def refuse_connector(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Raise ValueError unless the connector moves only pages that other requests can use."""
    name = connector_of(vllm_config)
    method = config.method
    if name is None:
        return
    given = f"kv_connector {name} cannot be combined with"
    if name not in CONNECTORS:
        raise ValueError(
            f"{given} diffusion decoding: it may store pages that a denoising step still "
            f"changes, or ignore a request's block length. Take {' or '.join(CONNECTORS)}."
        )
    served = f"{config.architecture} under strategy {config.strategy}"
    if "prefix_caching" in method.refuses:
        raise ValueError(
            f"{given} {served}: its keys and values depend on text after their page, so a "
            "stored page would be wrong for another request. Leave it out."
        )
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    if method.floats and not extra.get("offload_prompt_only", True):
        raise ValueError(
            "offload_prompt_only False cannot be combined with adaptive: keys of generated "
            "text depend on the pieces in which it was decided. Leave it out."
        )
    if transfer is not None and transfer.kv_load_failure_policy != "fail":
        raise ValueError(
            f"{given} kv_load_failure_policy "
            f"{transfer.kv_load_failure_policy!r}: "
            "a request whose pages are lost "
            "ends with an error. Leave it out."
        )
    if extra.get("bidirectional_kv_xfer"):
        raise ValueError(
            f"{given} bidirectional_kv_xfer: the last block of a text was never stored. Leave "
            "it out."
        )
    _refuse_unusable(name, extra)


def _refuse_unusable(name: str, extra: dict[str, Any]) -> None:
    """Raise ValueError for a connector that would end the engine once it has loaded."""
    offloads = name == CONNECTORS[0]
    spec = extra.get("spec_name", GPU_SPECS[0])
    if offloads and spec in GPU_SPECS and current_platform.is_cpu():
        raise ValueError(
            f"kv_connector {name} with {spec} needs a GPU: leave "
            "kv_offloading_size and kv_transfer_config out."
        )
    if not offloads and find_spec("nixl") is None:
        raise ValueError(
            f"kv_connector {name} needs the package nixl: run "
            "'pip install nixl', or leave kv_transfer_config out."
        )


def check_pulled_pages(vllm_config: VllmConfig, given: Any, prompt_len: int) -> None:
    """Raise VLLMValidationError for pages of a server that would end the engine."""
    reason = wrong_pages(given)
    if isinstance(given, dict) and connector_of(vllm_config) != CONNECTORS[1]:
        return
    if reason is None and given.get("do_remote_prefill"):
        page = vllm_config.cache_config.block_size
        groups = given["remote_block_ids"]
        fewest = min(map(len, groups), default=0)
        held = page * fewest
        if held < prompt_len:
            reason = f"pages hold {held} tokens, the prompt has {prompt_len}"
    if reason is not None:
        raise VLLMValidationError(
            f"{TRANSFER} must be those "
            "of the server that prefilled "
            f"this prompt: {reason}.",
            parameter=TRANSFER,
        )


def refuse_partition(layers: int, stages: int) -> None:
    """Raise ValueError if the layers cannot be divided among the stages of a pipeline."""
    if stages > layers:
        raise ValueError(
            f"pipeline_parallel_size {stages} is more than the model's "
            f"{layers} layers: take {layers} at most, for each stage needs a layer."
        )
    given = envs.VLLM_PP_LAYER_PARTITION
    if given is None:
        return
    parts = given.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    named = len(parts) == len(numbers) == stages
    if named and sum(numbers) == layers and min(numbers) > 0:
        return
    raise ValueError(
        f"VLLM_PP_LAYER_PARTITION {given!r} does not divide the model's {layers} layers "
        f"among pipeline_parallel_size {stages}: write a number of at least 1 for each "
        f"stage, {layers} in all, or unset it."
    )


def refuse_with_stages(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Raise ValueError for what the stages of a pipeline before the last cannot follow."""
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    refuse_partition(layers, config.stages)
    if config.stages == 1:
        return
    beside = f"cannot be combined with pipeline_parallel_size {config.stages}"
    if config.method.floats:
        raise ValueError(
            f"adaptive {config.adaptive!r} {beside}: only the last stage knows in time where a "
            "canvas starts. Leave one of them out."
        )
    worker = vllm_config.parallel_config.worker_cls
    if not is_ours(worker):
        raise ValueError(
            f"worker_cls {worker} {beside}, whose stages need our model runner: leave one of "
            "them out."
        )


def refuse_spread_experts(vllm_config: VllmConfig) -> None:
    """Raise ValueError if ranks on CPUs, whose kernels take all experts, are to share them."""
    parallel = vllm_config.parallel_config
    spread = parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1
    several = spread or parallel.data_parallel_size > 1
    if several and vllm_config.model_config.is_moe and current_platform.is_cpu():
        raise ValueError(
            "a mixture of experts cannot be combined with enable_expert_parallel or "
            "data_parallel_size on CPUs: vLLM spreads experts on GPUs only. Leave it out."
        )


def set_scheduler(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Set the method's scheduler and its token budget; disable chunked prefill if refused."""
    scheduler = vllm_config.scheduler_config
    method = config.method
    if "chunked_prefill" in method.refuses:
        scheduler.enable_chunked_prefill = False
    _fit_small_card(vllm_config)
    scheduler.scheduler_cls = SCHEDULERS[method.scheduler]
    if method.full_attention:
        _raise_for_refresh(vllm_config)
    else:
        _raise_for_canvases(vllm_config, config.canvas_length)


def _fit_small_card(vllm_config: VllmConfig) -> None:
    """Lower default limits of a step if vLLM may use little memory, of which rows take a share.

    A user's value that equals a default counts as a default.
    """
    if not is_small_card(vllm_config):
        return
    scheduler = vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    tokens, requests = EngineArgs.get_batch_defaults(parallel.world_size)
    limits = {
        "max_num_seqs": (requests, SMALL_CARD_REQUESTS),
        "max_num_batched_tokens": (tokens, SMALL_CARD_TOKENS),
    }
    for name, (defaults, most) in limits.items():
        chosen = getattr(scheduler, name)
        if chosen > most and is_default(chosen, set(defaults.values())):
            logger.info(
                "%s lowered from %d to %d: larger steps would take the memory of keys, of the "
                "%.1f GiB that vLLM may use.",
                name,
                chosen,
                most,
                usable_bytes(vllm_config) / 2**30,
            )
            setattr(scheduler, name, most)


def _raise_budget(vllm_config: VllmConfig, needed: int, reason: str) -> None:
    """Raise max_num_batched_tokens to `needed`, for a reason that is logged."""
    scheduler = vllm_config.scheduler_config
    if scheduler.max_num_batched_tokens >= needed:
        return
    logger.info(
        "max_num_batched_tokens raised from %d to %d: %s.",
        scheduler.max_num_batched_tokens,
        needed,
        reason,
    )
    scheduler.max_num_batched_tokens = needed


def _raise_for_canvases(vllm_config: VllmConfig, canvas_length: int) -> None:
    """Raise the token budget to a prompt, or a chunk of a prompt, and many canvases."""
    scheduler = vllm_config.scheduler_config
    canvases = min(scheduler.max_num_seqs, CONCURRENT_CANVASES)
    if scheduler.enable_chunked_prefill:
        what, prompt = "a chunk of a prompt", canvas_length
    else:
        what = "a whole prompt"
        prompt = vllm_config.model_config.max_model_len
    needed = prompt + canvases * canvas_length
    reason = f"{what} must fit one step with {canvases} canvases"
    _raise_budget(vllm_config, needed, reason)


def _raise_for_refresh(vllm_config: VllmConfig) -> None:
    """Raise the token budget to the longest refresh: a whole context, its canvas included.

    A budget that the user chose stays, and requests that cannot fit it are refused. A user's
    value that equals a default of vLLM's counts as a default.
    """
    parallel = vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    context = vllm_config.model_config.max_model_len
    defaults, _ = EngineArgs.get_batch_defaults(parallel.world_size)
    known = {*defaults.values(), scheduler.DEFAULT_MAX_NUM_BATCHED_TOKENS}
    if is_default(scheduler.max_num_batched_tokens, known):
        reason = "a refresh computes prompt and canvas in one step"
        _raise_budget(vllm_config, context, reason)


def is_default(chosen: int, defaults: set[int]) -> bool:
    """Return whether a value is a default, or twice of it: performance_mode "throughput"."""
    return chosen in defaults | {2 * value for value in defaults}


def set_prefix_caching(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Fit pages to whole blocks, and disable prefix caching if the page size does not fit.

    Raises ValueError if a connector would move pages of that size.
    """
    cache = vllm_config.cache_config
    block = config.block_length
    if "prefix_caching" in config.method.refuses:
        cache.enable_prefix_caching = False
    if not shares_pages(vllm_config):
        return
    if config.method.causal:
        block = 1  # a page's keys depend on earlier tokens only
    if not cache.user_specified_block_size:
        pages = max(PAGE, block)
        cache.block_size = -(-pages // block) * block
        cache.user_specified_block_size = True
    if cache.block_size % block and not config.method.causal_commit:
        name = connector_of(vllm_config)
        if name is not None:
            raise ValueError(
                f"kv_connector {name} needs pages of whole blocks, but block_size "
                f"{cache.block_size} is no multiple of block_length {block}: leave "
                "block_size out."
            )
        logger.warning(
            "Prefix caching is off: a page of %d tokens (block_size) holds no whole number of "
            "diffusion blocks of %d.",
            cache.block_size,
            block,
        )
        cache.enable_prefix_caching = False


def refuse_adapters(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Raise ValueError if `enable_lora` cannot be combined with the served model."""
    if vllm_config.lora_config is None:
        return
    model_config = vllm_config.model_config
    if config.draft_adapter:
        raise ValueError(
            "enable_lora cannot be combined with draft_adapter: leave one of them out."
        )
    if config.lora_path:
        raise ValueError(
            f"enable_lora cannot be combined with lora_path '{config.lora_path}': adapters of "
            "requests were trained on the base, not on merged weights. Leave one of them out."
        )
    stored = model_config.model_arch_config.quantization_config is not None
    if stored or model_config.quantization is not None:
        raise ValueError(
            f"enable_lora needs unquantised weights, got quantization "
            f"{model_config.quantization!r}: serve the unquantised base model."
        )
    if model_config.is_moe and current_platform.is_cpu():
        raise ValueError(
            f"enable_lora on {model_config.architecture} needs a GPU: under it vLLM computes "
            "experts by Triton kernels only. Merge one adapter by lora_path."
        )
