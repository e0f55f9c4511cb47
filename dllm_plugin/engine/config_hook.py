"""Configure vLLM to decode by diffusion.

Register our config hook and tokenizer mode with vLLM, once per process.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from transformers import Qwen2Config
from vllm.config import ModelConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from dllm_plugin.attention.backends import (
    FLOAT8_CACHES,
    refuse_ignored,
    set_causal_backend,
    set_graph_backend,
    take_distinct,
)
from dllm_plugin.config.adaptive import (
    CONTRACT,
    UNMEASURED,
    is_published,
    without_grammars,
)
from dllm_plugin.config.carriers import no_traces
from dllm_plugin.config.cpu_dtype import choose_compilation, user_chose
from dllm_plugin.config.cuda_graphs import (
    WORKER,
    set_graphs,
    set_worker,
)
from dllm_plugin.config.decode import TOKENIZER_MODE, DecodeConfig
from dllm_plugin.config.machine import resolve_for_machine
from dllm_plugin.config.options import Options
from dllm_plugin.config.quantisation import (
    check_head,
    refuse_for_mixtures,
    refuse_quantisation,
)
from dllm_plugin.config.request.structured_outputs import no_grammars
from dllm_plugin.config.resolution import check_options_read, fit_warm_up, resolve
from dllm_plugin.config.scheduling import (
    refuse_adapters,
    refuse_connector,
    refuse_spread_experts,
    refuse_unsupported,
    refuse_with_stages,
    set_prefix_caching,
    set_scheduler,
)
from dllm_plugin.config.step_times import KEY, path_for
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.models.checkpoints.lora import check_adapter
from dllm_plugin.models.checkpoints.trained_for import (
    UNKNOWN,
    find_mask_token,
    find_pad_token,
    find_turn_ends,
    pad_and_eos,
    published_threshold,
    trained_block_length,
    trained_to_edit,
)
from dllm_plugin.models.checkpoints.unserved import refuse_unserved_model, unknown_keys
from dllm_plugin.models.checkpoints.weights import (
    check_checkpoint,
    count_parameters,
)
from dllm_plugin.models.configs import WeDLMConfig

from . import auto_dtype, builtin_models
from .admission import leave_out_defaults, request_rules
from .platforms import refuse_platform

logger = init_logger("vllm.dllm_plugin")

# vLLM's cache of compiled forwards depends on the configuration, not on our sources: raise this
# number after a change of what is traced.
TRACED = 2


class DiffusionVllmConfig(VllmConfig):
    """Select model runner v2 always, also on a CPU without Triton.

    vLLM asks for Triton because runner v2 launches Triton kernels; on the CPU
    :mod:`dllm_plugin.kernels.runner` supplies NumPy forms of those that are launched. The class
    travels with the pickled configuration, so every process of this engine, and no other model,
    sees the choice.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in another process, where our class may have to take vLLM's place."""
        vars(self).update(state)
        builtin_models.take_over_again(self)

    @property
    def use_v2_model_runner(self) -> bool:
        """Return True: only runner v2 has the hooks that we extend."""
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
    """Resolve our options when vLLM checks the configuration of one of our architectures."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Record whether the user left the dtype open."""
        builtin_models.check_model(model_config)
        auto_dtype.close(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Resolve the ``dllm`` options and set what diffusion decoding needs.

        Raises ValueError with one sentence for options that are wrong or cannot be honoured.
        """
        written = _additional(vllm_config).get("dllm", {})
        if not isinstance(written, dict):
            raise ValueError(
                f"additional_config['dllm'] must be a dictionary, got {written!r}."
            )
        if builtin_models.serves(vllm_config, bool(written)):
            return
        _refuse(vllm_config)
        config = _resolve(vllm_config, Options.from_user(written))
        _check(vllm_config, config, written)
        _apply(vllm_config, config)


def _refuse(vllm_config: VllmConfig) -> None:
    """Refuse platforms and options of vLLM that diffusion decoding does not support."""
    refuse_platform()
    refuse_unsupported(vllm_config)
    refuse_quantisation(vllm_config)
    refuse_for_mixtures(vllm_config)
    refuse_unserved_model(vllm_config.model_config)


def _resolve(vllm_config: VllmConfig, options: Options) -> DecodeConfig:
    """Resolve open options by model, checkpoint, context and machine."""
    model_config = vllm_config.model_config
    family = FAMILIES[model_config.architecture]
    mask_token_id, found_in = find_mask_token(model_config, family)
    block_length, block_found_in = trained_block_length(model_config, family)
    _warn_of_checkpoint(model_config, options, block_found_in)
    config = resolve(
        options,
        model_config.architecture,
        model_config.max_model_len,
        mask_token_id,
        find_turn_ends(model_config, family),
        block_length,
        trained_to_edit(model_config, family),
        pad_and_eos(model_config),
        published_threshold(model_config, family),
    )
    if not current_platform.is_cpu():
        config = fit_warm_up(config, options, model_config.max_model_len)
    config = resolve_for_machine(vllm_config, options, config)
    _log_decoding(config, found_in, model_config.model)
    hides_pad = config.method.hides_pad
    hf_config = model_config.hf_config
    structure: tuple[int, ...] = ()
    if config.method.inserts:
        structure = (hf_config.delete_token_id, hf_config.split_token_id)
    return dataclasses.replace(
        config,
        hidden_token_id=find_pad_token(model_config) if hides_pad else None,
        structure_token_ids=structure,
        no_grammars=no_grammars(vllm_config) or without_grammars(config),
        no_traces=no_traces(vllm_config) or config.moves_tokens,
        stages=vllm_config.parallel_config.pipeline_parallel_size,
    )


def _check(
    vllm_config: VllmConfig, config: DecodeConfig, written: dict[str, Any]
) -> None:
    """Refuse options without effect, and damaged or foreign files."""
    check_options_read(config, written)
    refuse_connector(vllm_config, config)
    refuse_adapters(vllm_config, config)
    refuse_with_stages(vllm_config, config)
    refuse_spread_experts(vllm_config)
    check_head(vllm_config, config)
    check_checkpoint(vllm_config)
    check_adapter(vllm_config, config.lora_path)


def _apply(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Set vLLM's options for diffusion decoding, and store ours for every process."""
    model_config = vllm_config.model_config
    reason = auto_dtype.resolve_dtype(vllm_config)
    _choose_compilation(vllm_config)
    vllm_config.__class__ = DiffusionVllmConfig
    vllm_config.additional_config = {
        **_additional(vllm_config),
        "dllm": config.to_json(),
        "dllm_traced": TRACED,
        **reason,
    }
    vllm_config.diffusion_config = DiffusionConfig(canvas_length=config.canvas_length)
    model_config.tokenizer_mode = TOKENIZER_MODE
    model_config.logits_processors = [request_rules(config)]
    leave_out_defaults(model_config)
    set_scheduler(vllm_config, config)
    set_prefix_caching(vllm_config, config)
    set_graphs(vllm_config, config)
    set_worker(vllm_config)
    if config.kv_cache_layout == "distinct":
        take_distinct(vllm_config)
    else:
        refuse_ignored(vllm_config)
    set_causal_backend(vllm_config)
    set_graph_backend(vllm_config)
    _warn_of_clipped_keys(vllm_config)
    chosen = config.method.floats or config.draft_rows
    if chosen and vllm_config.parallel_config.worker_cls == WORKER:
        # Workers that choose widths read the path here.
        path = {KEY: str(path_for(vllm_config, config))}
        vllm_config.additional_config = _additional(vllm_config) | path


class LeftToRightRefusal(VerifyAndUpdateConfig):
    """Refuse our models in vLLM's backend for transformers, which decodes from left to right."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Raise ValueError if the architecture is ours."""
        ours = set(model_config.architectures) & set(FAMILIES)
        if ours:
            raise ValueError(
                f"model_impl 'transformers' would decode {ours.pop()} from left to right, for "
                "which it was not trained: leave model_impl out."
            )


def _warn_of_checkpoint(
    model_config: ModelConfig, options: Options, block_found_in: str
) -> None:
    """Warn of keys that nothing reads, and of a block length that is only a guess."""
    unknown = unknown_keys(model_config.hf_config)
    if unknown:
        logger.warning(
            "config.json has keys that DiffuPlug does not read: %s. If they change what the "
            "model computes, its text will be wrong; docs/support.md lists what is served.",
            ", ".join(unknown),
        )
    if block_found_in == UNKNOWN and options.block_length is None:
        logger.warning(
            "Neither config.json nor its name (%s) says how long the blocks of this checkpoint "
            "are; the family's default is taken. Set block_length if it was trained with another.",
            model_config.model,
        )


def _log_decoding(config: DecodeConfig, found_in: str, model: str) -> None:
    """Log how the model is decoded, and warnings about its accuracy."""
    logger.info(
        "Decoding %s by %s with policy %s (%s); mask token %d from %s; canvas %d, block %d.",
        config.architecture,
        config.strategy,
        config.policy,
        config.reason,
        config.mask_token_id,
        found_in,
        config.canvas_length,
        config.block_length,
    )
    if config.method.floats:
        logger.info(CONTRACT, config.adaptive, config.min_window, config.max_window)
        if not is_published(model, config.lora_path, config.min_window):
            logger.warning(UNMEASURED, model, config.min_window)
    if config.family.unverified:
        logger.warning(
            "%s was never compared with its authors' code: its text may be wrong.",
            config.family.title,
        )
    if config.lora_path is None and config.method.untrained:
        logger.warning(config.method.untrained)


def _warn_of_clipped_keys(vllm_config: VllmConfig) -> None:
    """Warn if a float8 cache without scales may clip keys, which biases of Qwen2 make large."""
    model_config = vllm_config.model_config
    quantised = model_config.model_arch_config.quantization_config or {}
    scaled = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
    config = model_config.hf_config
    asked = vllm_config.cache_config.cache_dtype
    biased = isinstance(config, Qwen2Config)
    if isinstance(config, WeDLMConfig):
        biased = config.qkv_bias
    if biased and asked in FLOAT8_CACHES and not scaled:
        logger.warning(
            "kv_cache_dtype %s clips keys above 448, since %s has no scales for them, and "
            "query and key biases of Qwen2 make large keys: compare accuracy with "
            "kv_cache_dtype auto.",
            asked,
            model_config.model,
        )


def _choose_compilation(vllm_config: VllmConfig) -> None:
    """Disable compilation of small models on CPUs unless the user chose."""
    model_config = vllm_config.model_config
    if current_platform.is_cpu() and not user_chose(vllm_config):
        parameters = count_parameters(model_config.model, model_config.revision)
        choose_compilation(vllm_config, parameters)


def _additional(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return additional_config; raises ValueError unless it is a dictionary."""
    given: Any = vllm_config.additional_config
    if not isinstance(given, dict):
        raise ValueError(
            "additional_config must be a dictionary to hold the 'dllm' options, got "
            f"{type(given).__name__}."
        )
    return given


# Names that `--model-impl transformers` gives to architectures.
TRANSFORMERS_BACKENDS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")


def register_config_hooks(architectures: Iterable[str]) -> None:
    """Register our config hook for each architecture in vLLM's map.

    Also registers the converter that marks an open dtype, and the refusal of the transformers
    backend.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    auto_dtype.register_convertors()
    for architecture in architectures:
        before = MODELS_CONFIG_MAP.get(architecture)
        if before is not DiffusionConfigHook:
            builtin_models.remember(architecture, before)
        MODELS_CONFIG_MAP[architecture] = DiffusionConfigHook
    for architecture in TRANSFORMERS_BACKENDS:
        MODELS_CONFIG_MAP[architecture] = LeftToRightRefusal


def register_tokenizer_mode() -> None:
    """Register our tokenizer mode: vLLM's HF tokenizer with our renderer. Idempotent."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    if TOKENIZER_MODE not in RENDERER_REGISTRY.renderers:
        RENDERER_REGISTRY.register(
            TOKENIZER_MODE, "dllm_plugin.engine.admission", "DiffusionRenderer"
        )
    if TOKENIZER_MODE not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(
            TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer"
        )
