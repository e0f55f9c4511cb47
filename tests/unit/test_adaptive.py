"""Options of floating canvases: what is chosen, what is refused, and what stays as it was."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import DREAM, LLADA, MASK, one_sentence, resolved
from vllm.config import CUDAGraphMode

from dllm_plugin.config.adaptive import fit_canvas, without_grammars
from dllm_plugin.config.cuda_graphs import WORKER, worker_for
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import Options
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.resolution import resolve
from dllm_plugin.config.worker_carriers import RESUMED, pack_id, unpack_id
from dllm_plugin.decoding.methods import METHODS
from dllm_plugin.engine.scheduling.load_scheduler import warn_without_graphs
from dllm_plugin.state.floating import FloatingView
from dllm_plugin.state.request_table import RequestTable

SDAR, LLADA2, FAST = "SDARForCausalLM", "LLaDA2MoeModelLM", "Fast_dLLM_QwenForCausalLM"


def floats(
    architecture: str = LLADA, strategy: str = "d2f", **options: Any
) -> DecodeConfig:
    return resolved(architecture, strategy=strategy, adaptive="throughput", **options)


@pytest.mark.parametrize(
    ("config", "windows", "canvas", "slots"),
    [
        (floats(), (8, 128), 128, 5),
        (floats(lora_path="."), (4, 128), 128, 5),
        (floats(DREAM, block_length=8), (8, 32), 128, 17),
        (floats(strategy="block_diffusion"), (8, 32), 32, 2),
        (floats(SDAR, "auto"), (4, 32), 32, 2),
        (floats(FAST, "auto", min_window=1, max_window=16), (1, 16), 32, 2),
        (floats(canvas_length=20, block_length=8), (8, 20), 20, 4),
    ],
)
def test_what_is_left_open(
    config: DecodeConfig, windows: tuple[int, int], canvas: int, slots: int
) -> None:
    assert (config.min_window, config.max_window) == windows
    assert (config.canvas_length, config.block_slots) == (canvas, slots)
    method = config.method
    assert method.floats and set(method.policies) == {config.policy} == {"threshold"}
    assert not (config.dedicated_commit or config.computes_next_block or method.edits)
    on_grid = config.family.absolute_grid
    assert ("prefix_caching" in method.refuses) != on_grid


def test_off_changes_nothing() -> None:
    for (strategy, _), row in METHODS.items():
        assert not row.floats
        if strategy == "d2f":
            config = resolved(LLADA, strategy=strategy)
            assert config.method == METHODS[strategy, "llada"]
            assert (config.adaptive, config.min_window, config.max_window) == (
                "off",
                0,
                0,
            )
            assert without_grammars(config) == ""


def test_llada21_needs_the_policy_by_name() -> None:
    """It was trained to edit, and its default policy replaces tokens."""
    options = {"adaptive": "balanced"}
    with pytest.raises(ValueError) as caught:
        resolve(Options.from_user(options), LLADA2, 512, MASK, edits=True)
    assert (
        "adaptive 'balanced' cannot be combined with policy 'joint_threshold'"
        in one_sentence(caught.value)
    )
    config = resolve(
        Options.from_user(options | {"policy": "threshold"}),
        LLADA2,
        512,
        MASK,
        edits=True,
    )
    assert config.method.floats and config.default_policy == "threshold"


def test_a_shortened_canvas() -> None:
    short = fit_canvas(dataclasses.replace(floats(), canvas_length=50))
    assert (short.min_window, short.max_window) == (8, 50)


@pytest.mark.parametrize(
    "widths", [[], None, "8", [0], [129], [8.0], [True], [4] * 4097, {4}]
)
def test_wrong_schedules(widths: Any) -> None:
    with pytest.raises(ValueError, match="dllm_schedule must") as caught:
        request_arguments(floats(), {"dllm_schedule": widths})
    one_sentence(caught.value)


def test_schedules() -> None:
    assert request_arguments(floats(), None).schedule is None
    asked = request_arguments(floats(), {"dllm_schedule": [1, 128]})
    assert asked.schedule == (1, 128)
    assert request_arguments(floats(), {"dllm_schedule": (4,)}).schedule == (4,)
    with pytest.raises(ValueError, match="has no effect with adaptive 'off'"):
        request_arguments(resolved(strategy="d2f"), {"dllm_schedule": [4]})


def test_resumed_texts_are_cut_at_their_pieces() -> None:
    """Others as ever; borders of the grid stay, and a chunk of a prefill cuts nothing else."""
    import torch

    config = floats(SDAR, "auto", block_length=4, max_window=4, canvas_length=4)
    canvas, start = (
        torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
    )
    table = RequestTable(config, 3, torch.device("cpu"))
    # vLLM's profiling run divides by it before any step.
    assert table.block_length.gpu.tolist() == [config.block_length] * 3
    view = FloatingView(config, canvas, start, table)
    view.pieces = {0: np.array([6]), 1: np.array([6, 7, 8, 10]), 2: np.array([6, 8, 9])}
    slots, ends = np.array([0, 1, 2]), np.array([6, 10, 8])
    stops = np.minimum(np.array([[4, 8, 12]] * 3), ends[:, None])
    found = view.prefill_stops(slots, np.array([True] * 3), ends, stops)
    assert [sorted(set(row)) for row in found.tolist()] == [
        [4, 6],
        [4, 6, 7, 8, 10],
        [4, 6, 8],
    ]
    alone = view.prefill_stops(slots[:1], np.array([True]), ends[:1], stops[:1])
    assert alone.tolist() == [[4, 6, 6]]


def test_pieces_travel_to_workers() -> None:
    sent = pickle.loads(pickle.dumps(pack_id("a", RESUMED, (7, 9))))
    assert sent == "a" and unpack_id(sent) == (RESUMED, (7, 9))


def test_what_steps_without_full_graphs_cost(
    vllm_config_for: Any,
    checkpoints: Path,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said on a GPU alone, with what stands in the way."""
    config = vllm_config_for(checkpoints / "tiny-sdar")
    compilation, parallel = config.compilation_config, config.parallel_config
    logged.clear()
    warn_without_graphs(config)
    assert logged == []
    platform = "dllm_plugin.engine.scheduling.load_scheduler.current_platform.is_cuda"
    monkeypatch.setattr(platform, lambda: True)
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    warn_without_graphs(config)
    config.model_config.enforce_eager = False
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    warn_without_graphs(config)
    parallel.worker_cls = "a.Worker"
    warn_without_graphs(config)
    eager, piecewise, foreign = map(one_sentence, logged.copy())
    assert (
        "cudagraph_mode NONE widths have no full CUDA graphs, so each forward is lau"
        in eager
    )
    assert eager.endswith("use FULL_AND_PIECEWISE without enforce_eager.")
    assert "cudagraph_mode PIECEWISE" in piecewise and piecewise.endswith(
        "FULL_AND_PIECEWISE."
    )
    assert foreign.endswith("use FULL_AND_PIECEWISE without a worker_cls of your own.")
    for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        compilation.cudagraph_mode = mode
        warn_without_graphs(config)
    assert len(logged) == 3


def test_a_foreign_worker_is_told_of_widths(logged: list[str]) -> None:
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert worker_for(floats(), "a.Worker", mode, True) == "a.Worker"
    assert logged == [
        "Steps of one width have no full CUDA graphs under worker_cls a.Worker: derive it from "
        f"{WORKER} to have them."
    ]
