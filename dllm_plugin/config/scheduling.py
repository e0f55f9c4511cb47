"""Set vLLM's scheduler and prefix cache for diffusion decoding; refuse what it cannot have."""

from vllm.config import SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from dllm_plugin.config.decode import TOKENIZER_MODE, DecodeConfig

logger = init_logger("vllm.dllm_plugin")

MAX_LOGPROBS = 100
CONCURRENT_CANVASES = 64
PAGE = 32  # what attention on CPUs takes; on GPUs a multiple of their default of 16
SCHEDULERS = {
    "canvas": "dllm_plugin.engine.scheduler.DiffusionScheduler",
    "refresh": "dllm_plugin.engine.refresh_scheduler.RefreshScheduler",
    "floating": "dllm_plugin.engine.adaptive_scheduler.AdaptiveScheduler",
}


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ValueError naming the first option of vLLM's that cannot be honoured."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    reasons = {
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
        "enable_dbo": parallel.enable_dbo,
        "enable_batch_sharded_sampling": parallel.enable_batch_sharded_sampling,
        "speculative_config": vllm_config.speculative_config is not None,
        "kv_transfer_config": vllm_config.kv_transfer_config is not None,
        "watermark_config": vllm_config.watermark_config is not None,
        "logits_processors": bool(model_config.logits_processors),
        "enable_prompt_embeds": model_config.enable_prompt_embeds,
        "logprobs_mode": model_config.logprobs_mode != "raw_logprobs",
        "return_sampling_mask": model_config.return_sampling_mask,
        "enable_trace_replay": model_config.enable_trace_replay,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold > 0,
        "scheduler_cls": scheduler.scheduler_cls is not None,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens is not None,
        "tokenizer_mode": model_config.tokenizer_mode not in ("auto", "hf", TOKENIZER_MODE),
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


def set_scheduler(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Take the method's scheduler, without what the method refuses, and room in its budget."""
    scheduler, method = vllm_config.scheduler_config, config.method
    if "chunked_prefill" in method.refuses:
        scheduler.enable_chunked_prefill = False
    scheduler.scheduler_cls = SCHEDULERS[method.scheduler]
    raise_budget = _raise_for_refresh if method.full_attention else _raise_for_canvases
    raise_budget(vllm_config, config.canvas_length)


def _raise_for_canvases(vllm_config: VllmConfig, canvas_length: int) -> None:
    """Make room in a step for a prompt, or a chunk of one, and many canvases."""
    scheduler = vllm_config.scheduler_config
    chunked = scheduler.enable_chunked_prefill
    canvases = min(scheduler.max_num_seqs, CONCURRENT_CANVASES)
    prompt = canvas_length if chunked else vllm_config.model_config.max_model_len
    needed = prompt + canvases * canvas_length
    if scheduler.max_num_batched_tokens < needed:
        logger.info(
            "max_num_batched_tokens raised from %d to %d: %s must fit one step with %d canvases.",
            scheduler.max_num_batched_tokens,
            needed,
            "a chunk of a prompt" if chunked else "a whole prompt",
            canvases,
        )
        scheduler.max_num_batched_tokens = needed


def _raise_for_refresh(vllm_config: VllmConfig, canvas_length: int) -> None:
    """Make room in a step for the longest refresh: a whole context, its canvas included.

    A budget that the user chose stays, and requests that cannot fit it are refused.
    """
    scheduler, needed = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    if scheduler.max_num_batched_tokens < needed and _is_default_budget(vllm_config):
        logger.info(
            "max_num_batched_tokens raised from %d to %d: a refresh computes prompt and canvas "
            "in one step.",
            scheduler.max_num_batched_tokens,
            needed,
        )
        scheduler.max_num_batched_tokens = needed


def set_prefix_caching(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Keep prefix caching where a page's KV depends on earlier pages alone: whole blocks a page."""
    cache, block = vllm_config.cache_config, config.block_length
    if "prefix_caching" in config.method.refuses or not cache.enable_prefix_caching:
        cache.enable_prefix_caching = False
        return
    if not cache.user_specified_block_size:
        pages = max(PAGE, block)
        cache.block_size = -(-pages // block) * block
        cache.user_specified_block_size = True
    if cache.block_size % block:
        logger.warning(
            "Prefix caching is off: a page of %d tokens (block_size) holds no whole number of "
            "diffusion blocks of %d.",
            cache.block_size,
            block,
        )
        cache.enable_prefix_caching = False


def _is_default_budget(vllm_config: VllmConfig) -> bool:
    """Return whether max_num_batched_tokens is a value that vLLM chooses by itself.

    A user who asks for just such a value cannot be told from one who asks for nothing.
    """
    defaults, _ = EngineArgs.get_batch_defaults(vllm_config.parallel_config.world_size)
    chosen = vllm_config.scheduler_config.max_num_batched_tokens
    known = {*defaults.values(), SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS}
    # performance_mode "throughput" doubles the default.
    return chosen in known | {2 * value for value in known}
