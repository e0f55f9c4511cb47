"""Measured times of steps: their file, what is made of them, and what the scheduler compares."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from dllm_plugin.commands import cli
from dllm_plugin.config.cuda_graphs import WORKER
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.step_times import (
    KEY,
    StepTimes,
    load,
    newest,
    own_path,
    path_for,
    save,
    settings_of,
)
from dllm_plugin.decoding.step_costs import KEY_SHARE, READS, Costs, MeasuredCosts
from dllm_plugin.decoding.widths import WidthController, widths_between
from dllm_plugin.engine.scheduling.load_scheduler import StepClock
from dllm_plugin.engine.worker.graph_times import step_times
from dllm_plugin.models.checkpoints.step_costs import (
    model_costs,
    step_costs,
    weight_bytes,
)

TIMES = StepTimes((2, 128, 512, 1024), (4.0, 4.6, 13.0, 24.0), 1e-5)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "times.json"
    assert load(path) is None
    save(path, TIMES)
    assert load(path) == TIMES and [file.name for file in path.parent.iterdir()] == [
        path.name
    ]
    save(path, TIMES._replace(per_key=0.0))
    found = load(path)
    assert found is not None and found.per_key == 0
    for wrong in (
        "",
        "[]",
        "{}",
        '{"ms": {}, "per_key": 1}',
        '{"ms": {"a": 1}, "per_key": 1}',
    ):
        path.write_text(wrong)
        assert load(path) is None, wrong


def test_where_it_cannot_be_written(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "file").write_text("")
    save(tmp_path / "file" / "times.json", TIMES)
    assert "The times of steps were not kept" in "".join(logged)


def test_measured_costs() -> None:
    """Padded as graphs are, between measured sizes, and beyond them."""
    costs = MeasuredCosts(TIMES.positions, TIMES.ms, 1e-5, 2.0, {8: [1, 4, 16]})
    assert costs.step(1, 2, 0) == 4.0 and costs.step(1, 1, 0) == 4.0
    assert costs.step(16, 8, 0) == costs.step(5, 8, 0) == 4.6
    assert costs.step(160, 2, 0) == pytest.approx(4.6 + (13 - 4.6) * 192 / 384)
    assert costs.step(17, 8, 0) == pytest.approx(4.6 + (13 - 4.6) * 8 / 384)
    assert costs.step(256, 8, 0) == pytest.approx(24 + 1024 * 11 / 512)
    # A width of one has no window that reads the context again.
    assert costs.step(2, 2, 100_000) - costs.step(2, 2, 0) == pytest.approx(2.0)
    assert costs.step(2, 1, 100_000) == 5.0
    assert MeasuredCosts((8,), (3.0,), 0.0, 1.0, {}).step(4, 8, 0) == 3.0


def test_measured_costs_choose_as_the_model_of_the_same_times() -> None:
    model = Costs(base=4.6, free=128, per_position=0.0215)
    positions = sorted({n * w for n in (1, 8, 64, 128, 256) for w in (2, 4, 8, 16, 32)})
    ms = [model.step(n, 1, 0) for n in positions]
    measured = MeasuredCosts(positions, ms, 0.0, 1.0, {})
    widths = widths_between(2, 32)
    for requests in (1, 8, 64, 128, 256):
        both = [WidthController(widths, False, c) for c in (model, measured)]
        one, other = (controller.rates(requests, 0) for controller in both)
        assert one == pytest.approx(other, rel=0.01)


def desc(requests: int, width: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        CUDAGraphMode.FULL, requests * width, requests, width
    )


def test_what_is_made_of_replays() -> None:
    """Medians of each size, never falling; keys are read again but at widths of one."""
    empty = {desc(8, 4): 5.0, desc(16, 2): 6.0, desc(1, 2): 4.5, desc(64, 2): 4.0}
    long = {desc(8, 4): 5.0 + 8 * 100 * 1.4 * 0.001}
    found = step_times(empty, long, 100, READS)
    assert found[:2] == (
        (2, 32, 128),
        (4.5, 5.5, 5.5),
    ) and found.per_key == pytest.approx(0.001)
    once = step_times(empty, long, 100, 1.0)
    assert once.per_key == pytest.approx(0.0014)
    narrow = step_times({desc(8, 1): 5.0}, {desc(8, 1): 5.8}, 100, READS)
    assert narrow.per_key == pytest.approx(0.001)
    assert step_times(empty, {desc(8, 4): 4.9}, 100, READS).per_key == 0


def test_the_scheduler_takes_the_file(
    vllm_config_for: Any,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    dllm = {"additional_config": {"dllm": {"adaptive": "throughput"}}}
    config = vllm_config_for(checkpoints / "tiny-sdar", **dllm)
    decode = get_decode_config(config)
    assert KEY not in config.additional_config  # a CPU has no graphs to measure
    assert isinstance(step_costs(config, decode), Costs)
    path = path_for(config, decode)
    assert tmp_path in path.parents
    config.additional_config[KEY] = str(path)
    assert isinstance(step_costs(config, decode), Costs)
    save(path, TIMES)
    found = step_costs(config, decode)
    assert (
        isinstance(found, MeasuredCosts) and found.graphs == {} and found.reads == READS
    )
    config.parallel_config.worker_cls = WORKER
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 64]
    captured = step_costs(config, decode)
    assert isinstance(captured, MeasuredCosts) and captured.graphs
    other = vllm_config_for(checkpoints / "tiny-sdar", max_num_seqs=3, **dllm)
    assert path_for(other, get_decode_config(other)) != path


def test_doctor_takes_what_an_engine_measured(
    vllm_config_for: Any,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The newest of this model and device, whatever the engine's limits were."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

    def measured(ms: float, engine: int = 0, **options: Any) -> Path:
        """As workers do, at the place that the configuration names."""
        given = {"dllm": {"adaptive": "throughput"}}
        config = vllm_config_for(
            checkpoints / "tiny-sdar", additional_config=given, **options
        )
        config.additional_config[KEY] = str(path_for(config, get_decode_config(config)))
        config.parallel_config.data_parallel_index = engine
        path = own_path(config)
        assert path is not None
        save(path, TIMES._replace(ms=(ms,), positions=(2,), per_key=0.0))
        return path

    def doctor(*asked: str) -> dict[str, str]:
        model = str(checkpoints / "tiny-sdar")
        assert (
            cli.main(["doctor", model, "--dtype=float32", "--requests=8", *asked]) == 0
        )
        lines = [
            line.split(":", 1) for line in capsys.readouterr().out.splitlines() if line
        ]
        return {name.strip(): value.strip() for name, value in lines}

    assert doctor()["step costs"] == "a model of large GPUs"
    old = measured(8.0, 1, max_num_seqs=1024, max_num_batched_tokens=8192)
    new = measured(4.0, max_num_seqs=3)
    measured(1.0, dtype="bfloat16")
    assert (
        old.stem.endswith("-1")
        and len({path.parent for path in tmp_path.glob("*/*/*")}) == 2
    )
    os.utime(old, (1, 1))
    report = doctor()
    said = "measured on this machine, with max_num_seqs 3, max_num_batched_tokens 768, "
    assert report["step costs"].startswith(said)
    assert report["step costs"].endswith("kv_cache_dtype auto, attention_backend auto")
    tokens = float(report["tokens per forward"].split()[0])
    assert float(report["tokens/s"].split()[0]) == pytest.approx(
        1000 * 8 * tokens / 4, rel=0.01
    )
    os.utime(new, (0, 0))
    balanced = doctor("--adaptive=balanced", "--min-window=2")["step costs"]
    assert (
        "with max_num_seqs 1024, max_num_batched_tokens 8192, max_model_len 256"
        in balanced
    )
    # Those of the engine itself are found by its settings alone.
    config = vllm_config_for(
        checkpoints / "tiny-sdar",
        additional_config={"dllm": {"adaptive": "throughput", "min_window": 2}},
    )
    decode = get_decode_config(config)
    config.additional_config[KEY] = str(path_for(config, decode))
    assert isinstance(step_costs(config, decode), Costs)
    old.write_text("")  # a damaged file is passed over
    assert newest(config, decode) == new and settings_of(new).startswith(
        "max_num_seqs 3, "
    )
    assert len(new.name) < 255


def test_the_model_of_a_checkpoint(vllm_config_for: Any, checkpoints: Path) -> None:
    """A key costs its share of the weights' bytes, by what was measured; more for two sequences."""
    folder = checkpoints / "tiny-sdar"
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    given = json.loads((folder / "config.json").read_text())
    heads = given["num_key_value_heads"] * given["head_dim"]
    for layout, reads in (("unified", READS), ("distinct", 1.0)):
        dllm = {"adaptive": "throughput", "kv_cache_layout": layout}
        config = vllm_config_for(
            folder, additional_config={"dllm": dllm}, dtype="float32"
        )
        costs = model_costs(config, get_decode_config(config))
        assert (
            costs.per_key
            == KEY_SHARE * 2 * 4 * heads * given["num_hidden_layers"] / weights
        )
        assert costs.reads == reads and costs.step(1, 1, 0) == 1


@pytest.mark.parametrize("name", ["tiny-sdar-moe", "tiny-llada2.0"])
def test_the_model_of_a_mixture(
    name: str, vllm_config_for: Any, checkpoints: Path
) -> None:
    """A small step reads the experts of one position, many positions read all of them."""
    folder = checkpoints / name
    files = list(folder.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in files)
    config = vllm_config_for(folder, additional_config={"dllm": {}})
    weights = weight_bytes(config, files)
    given = json.loads((folder / "config.json").read_text())
    with safe_open(files[0], "pt") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118
        of_experts = [file.get_tensor(name) for name in names]
    held = sum(tensor.numel() * tensor.itemsize for tensor in of_experts)
    assert weights.experts * weights.expert == held > 0
    assert weights.chosen == given["num_experts_per_tok"] < weights.experts
    assert weights.small == stored - (weights.experts - weights.chosen) * weights.expert
    costs = model_costs(config, get_decode_config(config))
    config.model_config.quantization = "fp8_per_channel"
    halved = weight_bytes(config, files)
    assert 0.5 * weights.small < halved.small < weights.small
    assert halved.expert / weights.expert == pytest.approx(halved.small / weights.small)
    all_read = (weights.experts - weights.chosen) * costs.per_expert
    assert costs.step(1, 1, 0) == pytest.approx(1)
    assert costs.step(costs.free, 1, 0) == pytest.approx(1 + all_read, rel=1e-3)


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps without prompts that were queued behind others."""
    now = [0.0]
    monkeypatch.setattr(
        "dllm_plugin.engine.scheduling.load_scheduler.time.perf_counter",
        lambda: now[0],
    )
    clock, told = StepClock(), []
    clock.finished()  # of a step before the clock was there
    for predicted in (10.0, None, 10.0):
        clock.scheduled(predicted, 2, 4)
    for seconds in (7.0, 0.02, 0.015):
        now[0] += seconds
        told.append(clock.finished())
    assert told == [None, None, (2, 4, pytest.approx(1.5))]
    assert clock.scale == pytest.approx(1 + 0.5 / 64)
    clock.scheduled(10.0, 2, 4)  # behind nothing
    now[0] += 3
    assert clock.finished() is None
    clock.scheduled(None, 0, 0)
    clock.scheduled(10.0, 2, 4)  # behind a step of nothing
    now[0] += 3
    assert clock.finished() is clock.finished() is None
    assert clock.scale == pytest.approx(1 + 0.5 / 64)
    for _ in range(1000):
        clock.scheduled(10.0, 2, 4)
        clock.scheduled(10.0, 2, 4)
        now[0] += 1
        clock.finished()
        clock.finished()
    assert 0.5 <= clock.scale <= 2


def test_times_never_reach_a_table_of_torch(tmp_path: Path) -> None:
    """Plain numbers, whatever replays return."""
    ms = {desc(1, 2): float(np.float64(4.5)), desc(2, 2): torch.tensor(5.0).item()}
    save(tmp_path / "times.json", step_times(ms, {desc(2, 2): 5.1}, 10, READS))
    assert json.loads((tmp_path / "times.json").read_text())["ms"] == {
        "2": 4.5,
        "4": 5.0,
    }
