"""GPU tests need CUDA and vLLM's CUDA build; CI has neither. Run: ``pytest tests/gpu -m gpu``."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Cases and checks that the tests of engines on CPUs have, too.
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
# Triton's default for float32 products is tf32, whose error flips confidences near a threshold.
os.environ["TRITON_F32_DEFAULT"] = "ieee"
# `torch.cuda.is_available` below may start CUDA, after which a fork cannot.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and skip it where there is no GPU."""
    for item in items:
        item.add_marker(pytest.mark.gpu)
        # Warnings that torch and vLLM raise about each other are not ours to fix.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
