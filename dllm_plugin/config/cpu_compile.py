"""Decide whether vLLM compiles a model on a CPU, where every start waits for the compiler."""

from vllm.config import VllmConfig
from vllm.config.vllm import OptimizationLevel
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.dllm_plugin")

# vLLM compiles on CPUs anew at every start, for tens of seconds, and a compiled forward of the
# bundled model takes 1 to 2 ms less of ten: tens of thousands of forwards until that pays.
EAGER_UP_TO = 100_000_000


def user_chose(vllm_config: VllmConfig) -> bool:
    """Return whether a user said anything about compiling.

    vLLM's defaults, when named (level 2, its backend), cannot be told from silence.
    """
    compilation = vllm_config.compilation_config
    return (
        vllm_config.model_config.enforce_eager
        or compilation.mode is not None
        or compilation.backend != current_platform.get_compile_backend()
        or bool(compilation.compile_sizes or compilation.custom_ops or compilation.splitting_ops)
        or vllm_config.optimization_level != OptimizationLevel.O2
    )


def is_small(parameters: int | None) -> bool:
    """Return whether a model has so few parameters that compiling does not pay; None: unknown."""
    return parameters is not None and parameters <= EAGER_UP_TO


def choose_compilation(vllm_config: VllmConfig, parameters: int | None) -> None:
    """Leave a small model uncompiled; say which in one line. To be asked unless the user chose.

    At optimization level 0, and with nothing else said, vLLM compiles nothing.
    """
    size = "unknown size" if parameters is None else f"{parameters / 1e6:.1f} million parameters"
    if is_small(parameters):
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
