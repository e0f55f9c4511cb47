"""Sizes of piecewise CUDA graphs under full attention, where there are no full ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from dllm_plugin.config.cuda_graphs import ANY_SIZE, set_graphs
from dllm_plugin.config.decode import get_decode_config

NONE, PIECEWISE = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE
OWN = "semi_autoregressive"
GIVEN: list[tuple[dict[str, Any], list[int] | None]] = [
    ({}, list(ANY_SIZE)),
    ({"tokens": 700}, [size for size in ANY_SIZE if size <= 640]),
    ({"cudagraph_capture_sizes": [8, 300]}, [8, 300]),
    ({"max_cudagraph_capture_size": 256}, None),
    ({"cudagraph_mode": PIECEWISE}, list(ANY_SIZE)),
    ({"cudagraph_mode": NONE}, None),
    ({"can": False}, None),
]


@pytest.mark.parametrize(
    ("strategy", "worker"), [(OWN, "auto"), ("dual_cache", "a.Worker")]
)
@pytest.mark.parametrize(("given", "sizes"), GIVEN, ids=str)
def test_piecewise_sizes_of_full_attention(
    given: dict[str, Any],
    sizes: list[int] | None,
    strategy: str,
    worker: str,
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forwards of prompt and canvas have graphs of up to 1,024 positions, without full graphs too.

    What vLLM would choose, or the user has chosen, is None or stays.
    """
    dllm = {"dllm": {"strategy": strategy}}
    config = vllm_config_for(checkpoints / "tiny-llada", additional_config=dllm)
    can, tokens = given.get("can", True), given.get("tokens", 2048)
    monkeypatch.setattr(
        "dllm_plugin.config.cuda_graphs.can_capture", lambda vllm_config: can
    )
    config.scheduler_config.max_num_batched_tokens = tokens
    config.parallel_config.worker_cls, compilation = worker, config.compilation_config
    for name in (
        "cudagraph_mode",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
    ):
        setattr(compilation, name, given.get(name))
    set_graphs(config, get_decode_config(config))
    assert compilation.cudagraph_capture_sizes == sizes
    assert compilation.cudagraph_mode == given.get("cudagraph_mode", PIECEWISE)
    assert config.parallel_config.worker_cls == worker
