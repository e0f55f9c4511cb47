"""Detect a dtype left at `auto`, and resolve it on CPUs.

vLLM resolves `auto` within ModelConfig and does not record it. On a CPU without bfloat16 units our
converter replaces `hf_config.dtype` by a marker, an :class:`OpenDtype`. If the marker survives in
ModelConfig, the user chose `auto`. Our config hook, which ModelConfig calls next, removes it.
"""

from collections.abc import Iterable

import torch
from vllm import ModelRegistry
from vllm.config import ModelConfig, VllmConfig
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

from dllm_plugin.config.cpu_dtype import (
    FLOAT32_BYTES,
    DtypeChoice,
    Memory,
    choose_dtype,
    multiplies_bf16_here,
    per_node,
)
from dllm_plugin.models import ARCHITECTURES
from dllm_plugin.models.checkpoints.weights import count_parameters
from dllm_plugin.models.config_bases import DiffusionConfig
from dllm_plugin.models.configs import ADOPTED, CONFIGS, adopt

logger = init_logger("vllm.dllm_plugin")

REASON = "dllm_dtype"  # key of `additional_config`, for `doctor`


class OpenDtype:
    """Mark an open dtype: equal to the dtype of `auto`, until the config hook is called."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype | str | None) -> None:
        self.dtype = dtype
        self.stored = stored  # dtype in the config

    def __eq__(self, other: object) -> bool:
        return other == self.dtype

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> str:
        return str(self.dtype)


class DiffusionArchConvertor(ModelArchConfigConvertorBase):
    """Convert a config of ours as vLLM does, once it has our class.

    On CPUs also import the model class, and mark the dtype as open if we choose it.
    """

    def convert(self, supports_multimodal: bool = True) -> ModelArchitectureConfig:
        """Return the architecture's numbers, as vLLM's own converter does."""
        config = self.hf_config
        adopt(config)
        if current_platform.is_cpu():
            ours = set(config.architectures or ()) & set(ARCHITECTURES)
            register_classes(ours)
            if ours and isinstance(config, DiffusionConfig):
                undecided = config.dtype_left_open is None
                if undecided and not multiplies_bf16_here():
                    leave_open(config, self.revision)
        return super().convert(supports_multimodal)


def register_classes(architectures: Iterable[str]) -> None:
    """Register the class of each of our architectures in place of its name.

    vLLM inspects a named class in a separate process, to keep CUDA uninitialised in this process.
    On CPUs that takes eight seconds, and an import a fraction of a second.
    """
    for architecture in set(architectures) & set(ARCHITECTURES):
        # Load the registered class: another plugin may have its own class under the name.
        model = ModelRegistry.models[architecture].load_model_cls()
        ModelRegistry.register_model(architecture, model)


def leave_open(config: DiffusionConfig, revision: str | None = None) -> None:
    """Replace the config's dtype by a marker that equals the dtype of `auto` in vLLM."""
    stored = ModelArchConfigConvertorBase.get_torch_dtype(
        config, config._name_or_path, revision=revision, config_format="hf"
    )
    known = current_platform.supported_dtypes
    kept = stored if stored in known and stored != torch.float32 else known[0]
    # Not typed as a dtype; removed before anything but ModelConfig reads it.
    vars(config)["dtype"] = OpenDtype(kept, config.dtype)


def register_convertors() -> None:
    """Register our converter for each model type that our configs have. Idempotent."""
    for config in CONFIGS:
        MODEL_ARCH_CONFIG_CONVERTORS[config.model_type] = DiffusionArchConvertor
    for adopted in ADOPTED.values():
        MODEL_ARCH_CONFIG_CONVERTORS.setdefault(
            adopted.model_type, DiffusionArchConvertor
        )


def close(model_config: ModelConfig) -> None:
    """Remove the marker from the config; record whether the user left the dtype open."""
    config = model_config.hf_config
    dtype = model_config.dtype
    mark = config.dtype
    if not isinstance(mark, OpenDtype):
        return
    config.dtype = mark.stored
    config.dtype_left_open = isinstance(dtype, OpenDtype)
    if config.dtype_left_open:
        model_config.dtype = mark.dtype


def resolve_dtype(vllm_config: VllmConfig) -> dict[str, str]:
    """Set an open dtype; return the reason, if any, as an entry of additional_config."""
    model_config = vllm_config.model_config
    if not model_config.hf_config.dtype_left_open:
        return {}
    parameters = count_parameters(model_config.model, model_config.revision)
    choice = _choose(vllm_config, parameters)
    model_config.dtype = choice.dtype
    if choice.dtype == torch.float32:
        logger.info(choice.line)
    else:
        logger.warning(choice.line)
    return {REASON: choice.reason}


def _choose(vllm_config: VllmConfig, parameters: int | None) -> DtypeChoice:
    """Choose a dtype; `parameters`: those of the checkpoint, None if unknown."""
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    nodes = get_visible_memory_node()
    workers = ranks * max(1, parallel.data_parallel_size_local)

    def spread(size: int) -> int:
        return per_node(size, workers, ranks, len(nodes))

    arch = model_config.model_arch_config
    cache = vllm_config.cache_config
    token = 2 * arch.total_num_hidden_layers * arch.total_num_kv_heads * arch.head_size
    asked = cache.kv_cache_memory_bytes
    memory = Memory(
        total=min(get_memory_node_info(node).total_memory for node in nodes),
        share=cache.gpu_memory_utilization,
        kv_asked=None if asked is None else spread(asked * ranks),
        kv_least=spread(token * FLOAT32_BYTES * model_config.max_model_len),
    )
    fixed_by = None
    if model_config.quantization is not None or arch.quantization_config is not None:
        fixed_by = "its weights are quantised"
    elif cache.cache_dtype not in ("auto", "float32"):
        fixed_by = f"kv_cache_dtype is {cache.cache_dtype}"
    weights = None if parameters is None else spread(parameters * FLOAT32_BYTES)
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype), (
        "vLLM resolves names before it calls our hook"
    )
    return choose_dtype(dtype, fixed_by, weights, memory)
