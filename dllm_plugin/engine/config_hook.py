"""The hook that turns a vLLM configuration into one that decodes by diffusion."""

import dataclasses
from typing import Any

from vllm.config import CUDAGraphMode, SchedulerConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from dllm_plugin.attention.backends import (
    flash_version,
    refuse_ignored,
    take_distinct,
    under_full_graphs,
)
from dllm_plugin.config.cuda_graphs import WORKER, capture_sizes, worker_for
from dllm_plugin.config.decode import TOKENIZER_MODE, DecodeConfig
from dllm_plugin.config.machine import can_capture, resolve_for_machine
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import check_options_read, resolve
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.engine.admission import request_rules
from dllm_plugin.models.checkpoints import lora
from dllm_plugin.models.checkpoints.special_tokens import find_mask_token, find_turn_ends
from dllm_plugin.models.checkpoints.training import trained_block_length, trained_to_edit
from dllm_plugin.models.checkpoints.weights import check_readable, checkpoint_folder

logger = init_logger("vllm.dllm_plugin")

MAX_LOGPROBS = 100
CONCURRENT_CANVASES = 64
WARMUP_SLACK = 8
PAGE = 32  # what attention on CPUs takes; on GPUs a multiple of their default of 16
# vLLM finds compiled forwards again by configuration: to be raised when one is traced otherwise.
TRACED = 1
SCHEDULER = "dllm_plugin.engine.scheduler.DiffusionScheduler"
REFRESH_SCHEDULER = "dllm_plugin.engine.refresh_scheduler.RefreshScheduler"


class DiffusionVllmConfig(VllmConfig):
    """A VllmConfig that always takes model runner v2, also on a CPU without Triton.

    vLLM asks for Triton because runner v2 launches Triton kernels; on the CPU
    :mod:`dllm_plugin.kernels.runner.cpu` supplies torch forms of those that are launched. The class
    travels with the pickled configuration, so every process of this engine, and no other model,
    sees the choice.
    """

    @property
    def use_v2_model_runner(self) -> bool:
        """True: only runner v2 has the hooks that we extend."""
        return True

    def _validate_v2_model_runner(self) -> None:
        if not current_platform.is_cpu():
            super()._validate_v2_model_runner()
            return
        unsupported = self._get_v2_model_runner_unsupported_features()
        if unsupported:
            raise ValueError(
                f"Diffusion decoding runs on model runner v2, which does not support: "
                f"{', '.join(unsupported)}; turn that off."
            )


class DiffusionConfigHook(VerifyAndUpdateConfig):
    """Called by vLLM for our architectures while a VllmConfig is being checked."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Resolve the ``dllm`` options and set what diffusion decoding needs.

        Raises ValueError with one sentence for options that are wrong or cannot be honoured.
        """
        _refuse_unsupported(vllm_config)
        model_config = vllm_config.model_config
        architecture = model_config.architecture
        family = FAMILIES[architecture]
        options = _user_options(vllm_config.additional_config)
        user = Options.from_user(options)
        mask_token_id, found_in = find_mask_token(model_config, family)
        turn_ends = find_turn_ends(model_config, family)
        block_length, _ = trained_block_length(model_config, family)
        config = resolve(
            user,
            architecture,
            model_config.max_model_len,
            mask_token_id,
            turn_ends,
            block_length,
            trained_to_edit(model_config, family),
        )
        if not current_platform.is_cpu():
            config = _fit_warmup(config, user, model_config.max_model_len)
        config = resolve_for_machine(vllm_config, user, config)
        check_options_read(config, options)
        _check_files(vllm_config, config)
        logger.info(
            "Decoding %s by %s with policy %s (%s); mask token %d from %s; canvas %d, block %d.",
            architecture,
            config.strategy,
            config.policy,
            config.reason,
            mask_token_id,
            found_in,
            config.canvas_length,
            config.block_length,
        )
        vllm_config.__class__ = DiffusionVllmConfig
        vllm_config.additional_config = {
            **_as_dict(vllm_config.additional_config),
            "dllm": config.to_json(),
            "dllm_traced": TRACED,
        }
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=config.canvas_length)
        model_config.tokenizer_mode = TOKENIZER_MODE
        model_config.logits_processors = [request_rules(config)]
        if config.method.scheduler == "refresh":
            _set_refresh_scheduler(vllm_config)
            _set_piecewise_graphs(vllm_config)
        else:
            _set_scheduler(vllm_config, config)
            _set_prefix_caching(vllm_config, config)
            _set_graph_sizes(vllm_config, config)
        if config.kv_cache_layout == "distinct":
            take_distinct(vllm_config)
        else:
            refuse_ignored(vllm_config)
        _set_attention_backend(vllm_config)


def _fit_warmup(config: DecodeConfig, user: Options, max_model_len: int) -> DecodeConfig:
    """Leave room for vLLM's GPU warm-up, which runs a canvas behind a prompt just as long."""
    fits = (max_model_len - WARMUP_SLACK) // 2
    if config.canvas_length <= fits:
        return config
    if config.whole_canvas and user.canvas_length is None and fits > 0:
        defaults = dataclasses.replace(config.defaults, block_length=fits)
        return dataclasses.replace(config, canvas_length=fits, defaults=defaults)
    if user.canvas_length is not None or fits < config.block_length:
        raise ValueError(
            f"canvas_length {config.canvas_length} needs max_model_len "
            f"{2 * config.canvas_length + WARMUP_SLACK} on a GPU, got {max_model_len}: lower "
            "canvas_length or block_length, or raise max_model_len."
        )
    blocks = min(config.max_active_blocks, fits)
    defaults = dataclasses.replace(config.defaults, max_active_blocks=blocks)
    return dataclasses.replace(config, canvas_length=fits, defaults=defaults)


def _check_files(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Refuse a damaged checkpoint or a foreign adapter before any process is started."""
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    folder = checkpoint_folder(model_config.model, model_config.revision, load_config.download_dir)
    if folder is not None and load_config.load_format != "dummy":
        check_readable(folder)
    if config.lora_path is not None:
        quantized = model_config.model_arch_config.quantization_config is not None
        lora.check_mergeable(config.lora_path, quantized, load_config.load_format)
        hf_config = model_config.hf_config
        served = (model_config.model, hf_config._name_or_path, hf_config.source_name)
        lora.check_base(lora.load_adapter(lora.adapter_folder(config.lora_path)), served)


def _as_dict(additional_config: Any) -> dict[str, Any]:
    if not isinstance(additional_config, dict):
        raise ValueError(
            "additional_config must be a dictionary to hold the 'dllm' options, got "
            f"{type(additional_config).__name__}."
        )
    return additional_config


def _user_options(additional_config: Any) -> dict[str, Any]:
    options = _as_dict(additional_config).get("dllm", {})
    if not isinstance(options, dict):
        raise ValueError(f"additional_config['dllm'] must be a dictionary, got {options!r}.")
    return options


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
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
        "max_logprobs": not 0 <= model_config.max_logprobs <= MAX_LOGPROBS,
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


def _set_scheduler(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    scheduler, canvas_length = vllm_config.scheduler_config, config.canvas_length
    scheduler.scheduler_cls = SCHEDULER
    if "chunked_prefill" in config.method.refuses:
        scheduler.enable_chunked_prefill = False
    chunked = scheduler.enable_chunked_prefill
    canvases = min(scheduler.max_num_seqs, CONCURRENT_CANVASES)
    prompt = canvas_length if chunked else vllm_config.model_config.max_model_len
    needed = prompt + canvases * canvas_length
    if scheduler.max_num_batched_tokens < needed:
        logger.info(
            "max_num_batched_tokens raised from %d to %d: %s must fit one step beside %d canvases.",
            scheduler.max_num_batched_tokens,
            needed,
            "a part of a prompt" if chunked else "a whole prompt",
            canvases,
        )
        scheduler.max_num_batched_tokens = needed


def _set_prefix_caching(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Only where the KV of a page depends on earlier pages alone: whole blocks on whole pages."""
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


def _set_refresh_scheduler(vllm_config: VllmConfig) -> None:
    """Synchronous scheduling, no partial passes; room for the longest refresh unless refused."""
    scheduler = vllm_config.scheduler_config
    if scheduler.async_scheduling:
        raise ValueError(
            "async_scheduling cannot be combined with full-attention decoding, whose next pass "
            "depends on the result of this one: leave it at its default."
        )
    scheduler.async_scheduling = False
    scheduler.scheduler_cls = REFRESH_SCHEDULER
    scheduler.enable_chunked_prefill = False
    vllm_config.cache_config.enable_prefix_caching = False
    needed = vllm_config.model_config.max_model_len
    # A budget that the user chose stays, and admission refuses what cannot fit.
    if scheduler.max_num_batched_tokens < needed and _is_default_budget(vllm_config):
        logger.info(
            "max_num_batched_tokens raised from %d to %d: a refresh computes prompt and canvas "
            "in one step.",
            scheduler.max_num_batched_tokens,
            needed,
        )
        scheduler.max_num_batched_tokens = needed


def _is_default_budget(vllm_config: VllmConfig) -> bool:
    """Whether max_num_batched_tokens is one of the values that vLLM chooses by itself.

    A user who asks for just such a value cannot be told from one who asks for nothing.
    """
    defaults, _ = EngineArgs.get_batch_defaults(vllm_config.parallel_config.world_size)
    chosen = vllm_config.scheduler_config.max_num_batched_tokens
    known = {*defaults.values(), SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS}
    # performance_mode "throughput" doubles the default.
    return chosen in known | {2 * value for value in known}


def _set_piecewise_graphs(vllm_config: VllmConfig) -> None:
    """Passes of different kinds share a step, so no CUDA graph can hold a whole one."""
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY):
        raise ValueError(
            "cudagraph_mode with full graphs alone cannot be combined with full-attention "
            "decoding: use PIECEWISE or NONE."
        )
    if compilation.cudagraph_mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE):
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _set_graph_sizes(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Capture full graphs at whole canvases and blocks fed alone, and piecewise ones."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    given, mode = parallel.worker_cls, compilation.cudagraph_mode
    parallel.worker_cls = worker_for(config, given, mode, can_capture(vllm_config))
    if compilation.cudagraph_mode == CUDAGraphMode.FULL:
        raise ValueError(
            "cudagraph_mode FULL would replay prefills with the attention rows of canvases: use "
            "FULL_AND_PIECEWISE or FULL_DECODE_ONLY."
        )
    chosen = compilation.cudagraph_capture_sizes is not None
    alone = config.commit_alone_from
    only_full = compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    if alone and only_full and parallel.worker_cls != WORKER:
        raise ValueError(
            f"commit_alone_from {alone} feeds steps that full CUDA graphs hold only on CUDA GPUs, "
            "with kv_cache_layout 'unified' and no worker_cls of your own: use cudagraph_mode "
            "FULL_AND_PIECEWISE, or leave commit_alone_from out."
        )
    if chosen or compilation.max_cudagraph_capture_size is not None:
        return
    if current_platform.is_cpu() or compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    limits = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    compilation.cudagraph_capture_sizes = capture_sizes(config, *limits)


def _set_attention_backend(vllm_config: VllmConfig) -> None:
    """Choose what full CUDA graphs capture, unless the user chose a backend that they can."""
    attention, compilation = vllm_config.attention_config, vllm_config.compilation_config
    if not can_capture(vllm_config):
        return
    if compilation.cudagraph_mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        return
    asked = attention.backend
    attention.backend = under_full_graphs(vllm_config, flash_version(vllm_config))
    if asked is None:
        logger.info("Attention backend %s under full CUDA graphs.", attention.backend.name)
