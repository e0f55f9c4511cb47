"""Modes, sizes and options of CUDA graphs of single-block steps."""

from typing import Any

import torch
from vllm.config import CUDAGraphMode

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
BOTH, ONLY_FULL = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
BLOCK, CANVAS, ALONE, REQUESTS = 4, 8, 3, 20
DLLM = {"block_length": BLOCK, "canvas_length": CANVAS, "commit_alone_from": ALONE}
CPU = torch.device("cpu")


def config_of(architecture: str = "LLaDAModelLM", **options: Any) -> DecodeConfig:
    dllm = {
        "strategy": "block_diffusion",
        "block_length": 16,
        "canvas_length": 32,
    } | options
    return resolve(Options.from_user(dllm), architecture, 4096, 0)
