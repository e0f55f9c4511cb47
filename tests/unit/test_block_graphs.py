"""Full CUDA graphs for steps of one block each: their sizes, their worker, their steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from block_graphs import (
    BOTH,
    DLLM,
    NONE,
    ONLY_FULL,
    PIECEWISE,
    config_of,
)
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dllm_plugin.commands import cli
from dllm_plugin.config.cuda_graphs import (
    CPU_WORKER,
    WORKER,
    block_counts,
    canvases_needed,
    capture_sizes,
    uniform_graphs,
    worker_for,
)
from dllm_plugin.config.machine import fewest_alone, never_alone
from dllm_plugin.engine.worker.worker import DiffusionWorker


def test_sizes_of_canvases_alone() -> None:
    assert capture_sizes(config_of(), 20, 8192) == [
        32 * n for n in (1, 2, 4, 8, 16, 20)
    ]
    # As many canvases as fit a step.
    assert capture_sizes(config_of(), 64, 300) == [32 * n for n in (1, 2, 4, 8, 9)]


def test_sizes_of_single_block_steps() -> None:
    canvases = {32 * n for n in (1, 2, 4, 8, 16, 20)}
    sizes = capture_sizes(config_of(commit_alone_from=8), 20, 8192)
    assert sizes == sorted(canvases | {16 * n for n in (8, 16, 20)})
    assert block_counts(sizes, 16, 8, 20) == [8, 16, 20]
    assert block_counts(sizes, 16, 1, 20) == [2, 4, 8, 16, 20]
    # No more requests run than whole canvases fit a step.
    sizes = capture_sizes(config_of(commit_alone_from=8), 64, 512)
    assert sizes[-1] == 512 and block_counts(sizes, 16, 8, 16) == [8, 16]
    # So many never run.
    assert capture_sizes(config_of(commit_alone_from=21), 20, 8192) == sorted(canvases)


def test_canvases_that_are_never_scheduled_have_no_graph() -> None:
    counts = [1, 2, 4, 8, 16]
    needed = {
        alone: counts[: canvases_needed(counts, alone)]
        for alone in (1, 2, 3, 5, 6, 9, 99)
    }
    assert needed == {
        **{1: [], 2: [1], 3: [1, 2], 5: [1, 2, 4], 6: [1, 2, 4, 8], 9: [1, 2, 4, 8]},
        99: counts,
    }
    assert canvases_needed([], 3) == 0


def test_tables_of_uniform_lengths() -> None:
    """Canvases, single blocks from some number of requests on, or blocks of full attention."""
    sizes = capture_sizes(config_of(), 20, 8192)
    assert uniform_graphs(config_of(), sizes, 20, 8192) == {32: [1, 2, 4, 8, 16, 20]}
    alone = config_of(commit_alone_from=8)
    sizes = capture_sizes(alone, 20, 8192)
    assert uniform_graphs(alone, sizes, 20, 8192) == {32: [1, 2, 4, 8], 16: [8, 16, 20]}
    full = config_of(strategy="dual_cache", block_length=32, canvas_length=96)
    sizes = capture_sizes(full, 64, 8192)
    [(length, counts)] = uniform_graphs(full, sizes, 64, 8192).items()
    assert length == 32 and counts == [*range(1, 17), *range(18, 33, 2)]
    assert {1, 8, 496, 512, 576} <= set(sizes) and max(sizes) == 1024
    # To the end of the canvas, from the first block or a later one.
    rest = config_of(strategy="prefix_cache", block_length=32, canvas_length=96)
    few = [1, 2]
    assert uniform_graphs(rest, sizes, 64, 8192) == {32: few, 64: few, 96: few}
    # As many as fit a step.
    assert uniform_graphs(full, sizes, 64, 320) == {32: list(range(1, 11))}


def test_refreshes_near_their_block_have_graphs() -> None:
    """Of the lengths that answers of whole blocks have, for two requests at most."""

    def graphs_of(**options: Any) -> dict[int, list[int]]:
        given = {
            "strategy": "dual_cache",
            "block_length": 32,
            "canvas_length": 128,
        } | options
        config = config_of(**given)
        graphs = uniform_graphs(config, capture_sizes(config, 64, 8192), 64, 8192)
        return {length: counts for length, counts in graphs.items() if length != 32}

    assert graphs_of() == graphs_of(suffix_window=32) == {}
    few, near = [1, 2], {"full_refresh_every": 8, "refresh_before": 32}
    assert graphs_of(**near, suffix_window=32) == {64: few, 96: few}
    assert graphs_of(**near, suffix_window=20) == {64: few, 84: few}
    assert graphs_of(**near) == {64: few, 96: few, 128: few}
    # From the start of the answer on: to the end of the canvas, or of what follows.
    for window in (0, 32, None):
        answer = graphs_of(full_refresh_every=8, suffix_window=window)
        assert answer == {64: few, 96: few, 128: few}
    # Every other block refreshes everything.
    assert graphs_of(full_refresh_every=2, suffix_window=0) == {64: few, 128: few}
    # Those of the first blocks begin in the prompt, which has any length.
    assert graphs_of(full_refresh_every=8, refresh_before=90, suffix_window=20) == {
        122: few
    }
    assert graphs_of(full_refresh_every=8, refresh_before=97) == {}
    # The blocks themselves keep their graphs; a block that is refreshed alone has the same length.
    assert graphs_of(full_refresh_every=2, refresh_before=0, suffix_window=0) == {}
    rest = graphs_of(**near, suffix_window=20, strategy="prefix_cache")
    assert rest == {52: few, 64: few, 84: few}
    # More lengths than are worth their start and memory.
    assert set(graphs_of(full_refresh_every=64, block_length=2, suffix_window=1)) == {2}


def test_counts_at_sizes_of_the_user() -> None:
    """Rounded up to blocks as vLLM rounds up to canvases; never above the largest size."""
    assert block_counts([50, 100], 16, 1, 64) == [4]
    assert block_counts([48, 96, 1024], 16, 4, 8) == [6]
    assert block_counts([], 16, 1, 64) == []


def test_the_worker_is_taken_if_graphs_can_be_captured() -> None:
    alone = config_of(commit_alone_from=8)
    for mode in (BOTH, ONLY_FULL, None):
        assert worker_for(alone, "auto", mode, True) == WORKER
        assert worker_for(alone, WORKER, mode, True) == WORKER
        assert worker_for(alone, "auto", mode, False) == "auto"
        assert worker_for(config_of(), "auto", mode, True) == "auto"
        distinct = config_of(commit_alone_from=8, kv_cache_layout="distinct")
        assert worker_for(distinct, "auto", mode, True) == "auto"
    for mode in (NONE, PIECEWISE):
        assert worker_for(alone, "auto", mode, True) == "auto"
    assert resolve_obj_by_qualname(WORKER) is DiffusionWorker


@pytest.fixture
def rule(vllm_config_for: Callable[..., Any], checkpoints: Path) -> Callable[..., int]:
    """What `commit_alone_from` becomes on a GPU; of a configuration that was made on a CPU."""

    def ask(
        most: int = 64,
        checkpoint: str = "tiny-sdar",
        architecture: str = "LLaDAModelLM",
        can: bool = True,
        worker: str = "auto",
        level: int = 2,
        backend: Any = None,
        dllm: dict[str, Any] | None = None,
        **compilation: Any,
    ) -> int:
        config = vllm_config_for(checkpoints / checkpoint, max_num_seqs=most)
        config.parallel_config.worker_cls, config.optimization_level = worker, level
        config.attention_config.backend = backend
        left_open = dict.fromkeys(
            ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "splitting_ops")
        )
        for name, value in (
            left_open | {"max_cudagraph_capture_size": None} | compilation
        ).items():
            setattr(config.compilation_config, name, value)
        decode = config_of(architecture, **dllm or {})
        return (
            0 if next(never_alone(decode, config, can), None) else fewest_alone(decode)
        )

    return ask


def test_single_block_steps_are_the_default_if_graphs_hold_them(
    rule: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for block, fewest in {4: 0, 7: 0, 8: 16, 16: 8, 20: 7, 32: 4}.items():
        assert rule(dllm={"block_length": block, "canvas_length": 2 * block}) == fewest
    whole = {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": BOTH}
    for given in (
        {},
        {"level": 3},
        {"most": 8},
        {"worker": WORKER},
        whole | {"level": 0},
    ):
        assert rule(**given) == 8, given
    assert rule(backend=AttentionBackendEnum.TRITON_ATTN) == 8
    blocks = {"strategy": "block_diffusion", "block_length": 16, "canvas_length": 64}
    assert rule(dllm=blocks) == 8
    never: list[dict[str, Any]] = [
        {"can": False},
        {"cudagraph_mode": NONE},
        {"cudagraph_mode": PIECEWISE},
        {"cudagraph_mode": ONLY_FULL},
        {"cudagraph_mode": BOTH, "mode": CompilationMode.NONE},
        {"cudagraph_mode": BOTH, "mode": CompilationMode.STOCK_TORCH_COMPILE},
        {"cudagraph_mode": BOTH, "level": 0},
        {"level": 1},
        {"level": 0},
        {"cudagraph_capture_sizes": [256]},
        {"cudagraph_capture_sizes": []},
        {"max_cudagraph_capture_size": 256},
        {"splitting_ops": []},
        {"backend": AttentionBackendEnum.FLEX_ATTENTION},
        {"worker": "a.Worker"},
        {"checkpoint": "tiny-sdar-moe"},
        {"most": 7},
        {"dllm": {"kv_cache_layout": "distinct"}},
        {"dllm": {"max_active_blocks": 2}},
        {"dllm": {"canvas_length": 16}},
        {"dllm": {"strategy": "d2f", "canvas_length": 64}},
        {"architecture": "A2DQwen3LMHeadModel", "dllm": blocks},
        {"architecture": "Fast_dLLM_QwenForCausalLM", "dllm": {"canvas_length": 64}},
    ]
    for given in never:
        assert rule(**given) == 0, given
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert rule() == 0


@pytest.mark.parametrize(
    ("given", "resolved"), [({}, 0), ({"commit_alone_from": 0}, 0), (DLLM, 3)]
)
def test_what_was_asked_for_is_kept(
    given: dict[str, Any],
    resolved: int,
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
) -> None:
    config = vllm_config_for(
        checkpoints / "tiny-sdar", additional_config={"dllm": given}
    )
    assert config.additional_config["dllm"]["commit_alone_from"] == resolved


def test_the_rule_is_asked_if_nobody_said(
    vllm_config_for: Callable[..., Any],
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dllm_plugin.config.machine.can_capture", lambda vllm_config: True
    )
    for given, resolved in (
        ({}, 4),
        ({"commit_alone_from": 0}, 0),
        ({"commit_alone_from": 9}, 9),
    ):
        dllm = {"block_length": 32, "canvas_length": 64} | given
        options = {"additional_config": {"dllm": dllm}, "enforce_eager": False}
        config = vllm_config_for(checkpoints / "tiny-sdar", **options)
        assert config.additional_config["dllm"]["commit_alone_from"] == resolved


@pytest.mark.parametrize(
    ("can", "said"), [(True, "from 32 requests on"), (False, "never")]
)
def test_doctor_tells(
    can: bool,
    said: str,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And no option of several open blocks, which one open block refuses."""
    monkeypatch.setattr(
        "dllm_plugin.config.machine.can_capture", lambda vllm_config: can
    )
    monkeypatch.setattr("dllm_plugin.config.machine.SHORTEST_BLOCK", 4)
    assert cli.main(["doctor", str(checkpoints / "tiny-sdar")]) == 0
    printed = capsys.readouterr().out
    assert (
        f"single-block steps:         {said}" in printed and "block_length:" in printed
    )
    assert "block_add_threshold" not in printed
    lines = [line.split(":", 1) for line in printed.splitlines() if ":" in line]
    report = {name.strip(): value.strip() for name, value in lines}
    assert (
        report["attention"] == "CPUAttentionBackend" and report["CUDA graphs"] == "none"
    )
    assert report["model compiled"] == report["step compiled"] == "no"


def test_a_worker_of_the_users_own_stays(logged: list[str]) -> None:
    assert (
        worker_for(config_of(commit_alone_from=8), "a.Worker", BOTH, True) == "a.Worker"
    )
    assert worker_for(config_of(), "a.Worker", BOTH, True) == "a.Worker"
    [text] = logged
    assert (
        "(commit_alone_from 8) have no full CUDA graphs under worker_cls a.Worker"
        in text
    )


def test_full_graphs_alone_are_refused_without_that_worker(
    vllm_config_for: Callable[..., Any], checkpoints: Path
) -> None:
    """On a CPU; eager steps would be all that is left."""
    options = {"additional_config": {"dllm": DLLM}, "enforce_eager": False}
    config = vllm_config_for(checkpoints / "tiny-sdar", **options)
    assert config.parallel_config.worker_cls == CPU_WORKER
    options["compilation_config"] = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    with pytest.raises(
        ValueError, match="commit_alone_from 3 takes .* only on CUDA GPUs"
    ):
        vllm_config_for(checkpoints / "tiny-sdar", **options)


def test_only_the_separate_modes_of_decodes_are_asked_for_full_graphs() -> None:
    full = [mode for mode in CUDAGraphMode if mode.separate_routine()]
    assert {mode.decode_mode() for mode in full} == {CUDAGraphMode.FULL}
