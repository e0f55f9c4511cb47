"""The manager of full CUDA graphs: which graph a step of single blocks takes."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from block_graphs import (
    ALONE,
    BLOCK,
    BOTH,
    CANVAS,
    CPU,
    DLLM,
    FULL,
    NONE,
    ONLY_FULL,
    PIECEWISE,
    REQUESTS,
)
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.config.cuda_graphs import (
    capture_sizes,
)
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.engine.worker.worker import BlockGraphManager


@pytest.fixture
def manager_of(
    vllm_config_for: Callable[..., Any], checkpoints: Path
) -> Callable[..., Any]:
    """Builds a graph manager as the runner does; nothing is captured, but all counts as if."""

    def build(mode: CUDAGraphMode, kind: Any = BlockGraphManager, **more: Any) -> Any:
        dllm, tokens = {"dllm": more.pop("dllm", DLLM)}, more.pop("tokens", None)
        checkpoint = checkpoints / more.pop("checkpoint", "tiny-sdar")
        config = vllm_config_for(
            checkpoint, max_num_seqs=REQUESTS, additional_config=dllm
        )
        if tokens is not None:
            config.scheduler_config.max_num_batched_tokens = tokens
        limits = REQUESTS, config.scheduler_config.max_num_batched_tokens
        sizes = capture_sizes(get_decode_config(config), *limits)
        config.compilation_config.cudagraph_capture_sizes = sizes
        config.compilation_config.max_cudagraph_capture_size = sizes[-1]
        # Memory for graphs, which a mode makes it ask for, is what CPUs do not have.
        manager = kind(config, CPU, NONE, CANVAS, **more)
        manager.cudagraph_mode = mode
        manager._init_candidates()
        manager._graphs_captured = True
        return manager

    return build


@pytest.mark.parametrize("mode", [BOTH, ONLY_FULL])
def test_steps_of_one_block_each_find_their_graph(
    mode: CUDAGraphMode, manager_of: Callable[..., Any]
) -> None:
    manager, vllms = manager_of(mode), manager_of(mode, ModelCudaGraphManager)
    padded = dict.fromkeys(range(3, 5), 4) | dict.fromkeys(range(5, 9), 8)
    padded |= dict.fromkeys(range(9, 17), 16) | dict.fromkeys(range(17, 21), 20)
    for n, captured in padded.items():
        expected = BatchExecutionDescriptor(FULL, captured * BLOCK, captured, BLOCK)
        assert manager.dispatch(n, n * BLOCK, BLOCK, 0, BLOCK) == expected
        assert expected in manager._capture_descs[FULL]
    # Whatever is no batch of one block each finds what it found, but for canvases of so many.
    for n in range(1, REQUESTS + 1):
        canvases = [(n, n * CANVAS, CANVAS)] if n < ALONE else []
        for step in (*canvases, (n, n * 2, 2), (n, n * BLOCK, None), (n, 7 * n, 7)):
            assert manager.dispatch(*step, 0, 8) == vllms.dispatch(*step, 0, 8), step
        if n < ALONE:
            assert manager.dispatch(*canvases[0], 0, 8).cg_mode == FULL
        else:
            found = manager.dispatch(n, n * CANVAS, CANVAS, 0, 8)
            assert found.cg_mode == (PIECEWISE if mode == BOTH else NONE)


def test_steps_of_full_attention_find_their_graph(
    manager_of: Callable[..., Any],
) -> None:
    """Blocks alone have full graphs; steps with a refresh, or of other lengths, piecewise ones."""
    dllm = {"strategy": "dual_cache", "block_length": BLOCK, "canvas_length": CANVAS}
    manager = manager_of(BOTH, dllm=dllm, checkpoint="tiny-llada")
    for n in range(1, REQUESTS + 1):
        found = manager.dispatch(n, n * BLOCK, BLOCK, 0, BLOCK)
        assert (found.cg_mode, found.uniform_token_count) == (FULL, BLOCK)
        assert n <= found.num_reqs == found.num_tokens // BLOCK <= max(n + 7, 4)
        for step in ((n, n * BLOCK + 9, None), (n, n * 3, 3), (n, n * CANVAS, CANVAS)):
            assert manager.dispatch(*step, 0, CANVAS).cg_mode == PIECEWISE, step


def test_the_largest_graph_is_captured_first(manager_of: Callable[..., Any]) -> None:
    """Its results make the buffer of all, and vLLM's memory profile takes the first two."""
    captured = manager_of(BOTH)._capture_descs[FULL]
    tokens = [desc.num_tokens for desc in captured]
    assert tokens == sorted(tokens, reverse=True) and len(set(captured)) == len(
        captured
    )
    for desc in captured:
        assert desc.num_tokens == desc.num_reqs * desc.uniform_token_count
        assert desc.num_reqs <= REQUESTS
    blocks = [desc.num_reqs for desc in captured if desc.uniform_token_count == BLOCK]
    assert blocks == [20, 16, 8, 4]
    assert [
        desc.num_reqs for desc in captured if desc.uniform_token_count == CANVAS
    ] == [2, 1]


def test_no_more_blocks_than_requests_that_can_run(
    manager_of: Callable[..., Any],
) -> None:
    """A whole canvas of each has to fit a step."""
    found = manager_of(BOTH, tokens=10 * CANVAS)._capture_descs[FULL]
    counts = [desc.num_reqs for desc in found if desc.uniform_token_count == BLOCK]
    assert counts == [10, 8, 4]


def test_every_case_of_adapters_has_them(manager_of: Callable[..., Any]) -> None:
    manager = manager_of(BOTH, lora_capture_cases=[0, 2])
    for loras, case in ((0, 0), (1, 2), (2, 2)):
        found = manager.dispatch(5, 5 * BLOCK, BLOCK, loras, BLOCK)
        assert (found.cg_mode, found.num_reqs, found.num_active_loras) == (
            FULL,
            8,
            case,
        )
    tokens = [desc.num_tokens for desc in manager._capture_descs[FULL]]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize("mode", [PIECEWISE, NONE])
def test_no_full_graphs_if_backends_have_none(
    mode: CUDAGraphMode, manager_of: Callable[..., Any]
) -> None:
    manager, vllms = manager_of(mode), manager_of(mode, ModelCudaGraphManager)
    assert manager._capture_descs == vllms._capture_descs
    assert manager._candidates == vllms._candidates


def test_nothing_is_added_without_single_block_steps(
    manager_of: Callable[..., Any],
) -> None:
    dllm = {"block_length": BLOCK, "canvas_length": CANVAS}
    manager, vllms = (
        manager_of(BOTH, dllm=dllm),
        manager_of(BOTH, ModelCudaGraphManager, dllm=dllm),
    )
    assert manager._capture_descs == vllms._capture_descs
    assert manager._candidates == vllms._candidates


def test_nobody_else_keeps_the_manager() -> None:
    """What the runner hands on while it initialises: we hand on ours instead."""
    source = inspect.getsource(GPUModelRunner.initialize_kv_cache)
    assert (
        source.count("self.cudagraph_manager") == 2
    )  # made, and given to FastPrefillHelper
    assert (
        "FastPrefillHelper(\n                self.cudagraph_manager, self.max_num_tokens"
        in source
    )
