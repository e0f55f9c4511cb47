"""Choose the dtype of `auto` on a CPU that does not multiply bfloat16 natively.

There a forward in bfloat16 takes several times as long as in float32, so float32 is chosen if its
weights fit. Everything but :func:`multiplies_bf16_here` is a function of its arguments.

It is also chosen whether vLLM compiles a model on a CPU, where every start waits for the compiler.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv

# Any of these flags of `torch.cpu.get_capabilities` means bfloat16 GEMMs in hardware.
UNITS = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
# Architectures with known flags have one of these keys, true or false.
KNOWN = ("avx2", "neon")
# Values of ONEDNN_MAX_CPU_ISA that keep oneDNN, which multiplies for vLLM, from these units.
WITHOUT = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)
FLOAT32_BYTES = 4
NO_UNITS = (
    "this CPU does not multiply bfloat16 natively (no AMX, AVX512_BF16 or Arm BF16)"
)
COST = (
    "a forward takes about 4 to 5 times as long as in float32 (the bundled model on two AVX2 "
    "cores: 52 against 11.4 ms with one request, 766 against 198 ms with 16)"
)


@dataclass(frozen=True)
class Memory:
    """Store the size of a memory node and of its KV cache, in bytes.

    total        main memory of the node
    share        gpu_memory_utilization: the part of it that vLLM may use
    kv_asked     KV cache of all its workers if the user chose its size, which vLLM allocates
                 outside of `share`; else None
    kv_least     KV cache of one request as long as the context: vLLM does not start with less
    """

    total: int
    share: float
    kv_asked: int | None
    kv_least: int

    def holds(self, weights: int) -> bool:
        """Return whether weights of this size in bytes fit in addition to the KV cache."""
        if self.kv_asked is None:
            return weights + self.kv_least <= self.total * self.share
        return (
            weights <= self.total * self.share and weights + self.kv_asked <= self.total
        )


@dataclass(frozen=True)
class DtypeChoice:
    """Store a dtype, a short reason, and the line for the log."""

    dtype: torch.dtype
    reason: str
    line: str


def multiplies_bf16(capabilities: Mapping[str, Any], isa_limit: str | None) -> bool:
    """Return whether bfloat16 is multiplied in hardware; True for unknown architectures."""
    if not any(name in capabilities for name in KNOWN):
        return True
    if isa_limit is not None and isa_limit.upper() in WITHOUT:
        return False
    return any(capabilities.get(name) is True for name in UNITS)


def multiplies_bf16_here() -> bool:
    """Return whether this machine multiplies bfloat16, by torch and oneDNN's variable."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA"))
    return multiplies_bf16(torch.cpu.get_capabilities(), limit)


def per_node(size: int, workers: int, ranks: int, nodes: int) -> int:
    """Return the bytes on the fullest memory node for `size` bytes split over `ranks`.

    `workers` are all processes on this machine: `ranks` for each replica.
    """
    return cdiv(size, ranks) * cdiv(workers, nodes)


def choose_dtype(
    stored: torch.dtype,
    fixed_by: str | None,
    weights: int | None,
    memory: Memory,
) -> DtypeChoice:
    """Choose the dtype of `auto` if vLLM itself would choose `stored`.

    `fixed_by`: why no other dtype is possible, or None. `weights`: bytes of the weights in float32
    on the fullest memory node, None if unknown.
    """
    kept = str(stored).removeprefix("torch.")
    if fixed_by is not None:
        line = f"dtype stays {kept} ({fixed_by}) although {NO_UNITS}: {COST}."
        return DtypeChoice(stored, fixed_by, line)
    if weights is not None and memory.holds(weights):
        line = f"dtype is float32: {NO_UNITS}; --dtype {kept} takes what vLLM would choose."
        return DtypeChoice(torch.float32, NO_UNITS, line)
    why = "its size is not known"
    size = "the size of the weights is not known"
    if weights is not None:
        why = "float32 does not fit"
        gib = 1 << 30
        kv = memory.kv_least if memory.kv_asked is None else memory.kv_asked
        size = (
            f"float32 needs {weights / gib:.1f} GiB beside a KV cache of {kv / gib:.1f}, and vLLM "
            f"may use {memory.share:g} of {memory.total / gib:.1f} (gpu_memory_utilization)"
        )
    line = (
        f"dtype stays {kept} although {NO_UNITS}: {COST}. {size}: --dtype float32 takes it "
        "all the same."
    )
    return DtypeChoice(stored, f"{why}, and {NO_UNITS}", line)


logger = init_logger("vllm.dllm_plugin")

# vLLM compiles on CPUs anew at every start, for tens of seconds, and a compiled forward of the
# bundled model takes 1 to 2 ms less of ten: tens of thousands of forwards until that pays.
EAGER_UP_TO = 100_000_000


def user_chose(vllm_config: VllmConfig) -> bool:
    """Return whether the user set an option of compilation.

    vLLM's defaults (level 2, its backend) count as not set.
    """
    compilation = vllm_config.compilation_config
    return (
        vllm_config.model_config.enforce_eager
        or compilation.mode is not None
        or compilation.backend != current_platform.get_compile_backend()
        or bool(compilation.compile_sizes or compilation.custom_ops)
        or bool(compilation.splitting_ops)
        or vllm_config.optimization_level != OptimizationLevel.O2
    )


def choose_compilation(vllm_config: VllmConfig, parameters: int | None) -> None:
    """Disable compilation of a small model, and log the choice; call it unless the user chose.

    At optimization level 0, without other options of compilation, vLLM compiles nothing.

    Args:
        parameters: how many the model has; None: unknown.
    """
    size = "unknown size"
    if parameters is not None:
        size = f"{parameters / 1e6:.1f} million parameters"
    if parameters is not None and parameters <= EAGER_UP_TO:
        vllm_config.optimization_level = OptimizationLevel.O0
        logger.info(
            "Not compiled: a model of %s would not win back on a CPU what compiling costs at every "
            "start; --compilation-config '{\"mode\": 3}' compiles it.",
            size,
        )
    else:
        logger.info(
            "Compiled at every start, as vLLM does on CPUs: a model of %s, and more than %d "
            "million may pay; --enforce-eager starts sooner.",
            size,
            EAGER_UP_TO // 10**6,
        )
