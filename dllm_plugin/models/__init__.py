"""Subclass vLLM's models; `checkpoints` reads what lies on disk."""

import os
import re
from typing import Any

from dllm_plugin.decoding.families import SERVED

# Architecture name in config.json -> class: one for each parent and layout of weights.
ARCHITECTURES: dict[str, str] = {}
for name, (_, path) in SERVED.items():
    ARCHITECTURES[name] = f"dllm_plugin.models.{path}"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch reads it at the first GEMM of a process
# Compute capability of the H200, where GEMMs without it were measured, and the H100.
FASTER_ON = ((9, 0),)


def of_model_type(config: dict[str, Any]) -> str:
    """Return the architecture whose name begins as the model type; empty if none does."""
    wanted = _letters(str(config.get("model_type") or "-"))
    for name in sorted(ARCHITECTURES, key=len):
        if wanted and _letters(name).startswith(wanted):
            return name
    return ""


def _letters(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def register_configs() -> None:
    """Register our config classes and their tokenizers with transformers; may be called again.

    Must run before any config or tokenizer of these models is loaded. Otherwise transformers asks
    on the terminal whether it may run the repository's own Python code.
    """
    from transformers import AutoConfig, AutoTokenizer

    from .configs import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        if config.tokenizer is not None:
            AutoTokenizer.register(
                config, tokenizer_class=config.tokenizer, exist_ok=True
            )


def forgo_workspace(capability: tuple[int, int] | None = None) -> None:
    """Disable cuBLAS's workspace before the first GEMM of this process, unless a user has set it.

    With a workspace, cuBLAS splits the inner dimension of GEMMs with few rows (split-K) and adds up
    the partial sums with a second kernel. On an H200 without a workspace, the GEMMs of a layer take
    3 % less time at 32 rows and as long at 128 and more (benchmarks/reports/h200_steps.md).

    The setting belongs to the process: with `VLLM_ENABLE_V1_MULTIPROCESSING=0`, that is the user's
    own process, and later engines in it have the same setting.

    Args:
        capability: compute capability of the GPU; default: the current GPU's, if there is one.
    """
    import torch

    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if capability in FASTER_ON:
        os.environ.setdefault(WORKSPACE, ":0:0")
