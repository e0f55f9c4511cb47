"""Full CUDA graphs of floating canvases: widths, sequences, and what load may choose."""

import random
from typing import Any

import pytest
import torch
from scripted import Loop, sampling
from scripted_rows import Hashed
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from dllm_plugin.attention.sequences import AttentionSequences
from dllm_plugin.config.cuda_graphs import (
    ANY_SIZE,
    WORKER,
    allowed_widths,
    capture_sizes,
    captured_graphs,
    set_graphs,
    uniform_graphs,
)
from dllm_plugin.config.decode import DecodeConfig, get_decode_config
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve
from dllm_plugin.decoding.acceptance import Acceptance
from dllm_plugin.decoding.step_costs import Costs
from dllm_plugin.decoding.widths import (
    WidthController,
    allowed,
    widths_between,
    widths_worth,
)
from dllm_plugin.engine.worker.worker import BlockGraphManager

BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
CPU = torch.device("cpu")


def config_of(**options: Any) -> DecodeConfig:
    dllm = {
        "strategy": "block_diffusion",
        "adaptive": "throughput",
        "block_length": 32,
    } | options
    return resolve(Options.from_user(dllm), "SDARForCausalLM", 4096, 0)


def test_sequences_of_captured_steps() -> None:
    """Those of eager steps, whatever is decided, then empty ones for the padding."""
    dice = random.Random(5)
    dllm = {
        "strategy": "d2f",
        "adaptive": "throughput",
        "block_length": 4,
        "canvas_length": 12,
    }
    loop = Loop(dllm, max_model_len=256)
    attention = AttentionSequences(loop.states, 8, 96)
    for prompt in range(1, 8):
        loop.start(
            [1] * prompt, Hashed(prompt), sampling(200, None), f"request-{prompt}"
        )
    each, runs_of_no_token, mask = attention.sequences_per_request, 0, loop.mask
    assert each == 5  # run, three parts of a window, rest
    for _ in range(60):
        runs = dice.sample(loop.running, dice.randint(1, len(loop.running)))
        width = dice.randint(1, 12)
        decided = [dice.choice([0.0, 0.5, 1.0]) for _ in loop.states.canvas_NC]
        for slot, share in enumerate(decided):
            row = [1 if dice.random() < share else mask for _ in range(12)]
            loop.states.canvas_NC[slot] = torch.tensor(row)
        batch = loop.batch(runs, [width] * len(runs), [])
        eager = attention.eager(batch, ())
        padded = batch.num_reqs_after_padding = dice.randint(len(runs), 8)
        for left_behind in (attention.query_start_loc[1:], attention.seq_lens):
            left_behind.fill_(77)
        table = torch.arange(padded * 3, dtype=torch.int32).view(padded, 3)
        captured = attention.captured(batch, (table,))
        used = each * len(runs)
        assert (
            captured.query_start_loc[: used + 1].tolist()
            == eager.query_start_loc.tolist()
        )
        assert captured.seq_lens[:used].tolist() == eager.seq_lens.tolist()
        rest = each * (padded - len(runs))
        assert captured.query_start_loc[used:].tolist() == [batch.num_tokens] * (
            rest + 1
        )
        assert captured.seq_lens[used:].tolist() == [0] * rest
        assert torch.equal(captured.block_tables[0], table.repeat_interleave(each, 0))
        assert captured.max_query_len == max(width, 2)
        lengths = captured.query_start_loc.diff()
        assert lengths.min() >= 0 and lengths.sum() == width * len(runs)
        runs_of_no_token += int((lengths[:used:each] == 0).sum())
    assert runs_of_no_token > 20
    with pytest.raises(
        AssertionError, match="5 tokens of 2 requests are no uniform step"
    ):
        attention.captured(loop.batch(loop.running[:2], [2, 3], []), ())


@pytest.mark.parametrize("shift", [False, True])
def test_captured_widths_lose_little(shift: bool) -> None:
    """Against every width, at every acceptance that the controller knows."""
    widths, costs = widths_between(1 if shift else 2, 32), Costs()
    for requests in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256):
        chosen = widths_worth(requests, widths, shift)
        assert 1 <= len(chosen) <= 6 and list(chosen) == sorted(
            set(chosen) & set(widths)
        )
        times = [costs.step(requests, width, 0) for width in widths]
        rates = Acceptance(widths, shift).curves / torch.tensor(times).numpy()
        kept = rates[:, [widths.index(width) for width in chosen]].max(axis=1)
        assert (kept / rates.max(axis=1)).min() > 0.95, requests
    # One request: a forward reads all weights whatever it computes.
    assert 32 in widths_worth(1, widths, shift)


def test_the_table_of_widths() -> None:
    config = config_of(min_window=2)
    sizes = capture_sizes(config, 256, 16384)
    assert sizes == list(ANY_SIZE) and max(sizes) == 1024
    graphs = uniform_graphs(config, sizes, 256, 16384)
    counts = {n for some in graphs.values() for n in some}
    assert {1, 2, 4, 8, 16, 56, 64, 80, 256} <= counts and not {72, 88} & counts
    assert all(some == sorted(some) for some in graphs.values())
    assert max(n * width for width, some in graphs.items() for n in some) <= 1024
    assert sum(map(len, graphs.values())) <= 100
    # As many requests as whole canvases fit a step.
    few = uniform_graphs(config, sizes, 256, 320)
    assert max(n for some in few.values() for n in some) == 10


def test_load_chooses_what_is_captured() -> None:
    widths = (2, 4, 8, 16, 32)
    may = allowed({2: [1, 4], 8: [1, 4], 32: [1]}, widths, 40)
    assert may == {
        1: (True, False, True, False, True),
        4: (True, False, True, True, True),
    }
    controller = WidthController(widths, False, Costs(), allowed=may)
    for requests, choices in (
        (1, {2, 8, 32}),
        (3, {2, 8, 16, 32}),
        (4, {2, 8, 16, 32}),
    ):
        assert {controller.width(requests, 0) for _ in range(200)} <= choices
        promised = controller.rates(requests, 0)
        assert {w for w, rate in zip(widths, promised, strict=True) if rate} == choices
    assert (controller.rates(5, 0) > 0).all()
    # Trials take the captured width beside.
    tried = WidthController((2, 4, 8), False, Costs(), allowed={8: (True, False, True)})
    assert {tried.width(8, 0) for _ in range(200)} == {2, 8}


def test_the_manager_finds_every_width(vllm_config_for: Any, checkpoints: Any) -> None:
    dllm = {
        "adaptive": "throughput",
        "block_length": 8,
        "canvas_length": 8,
        "min_window": 2,
    }
    config = vllm_config_for(
        checkpoints / "tiny-sdar", max_num_seqs=20, additional_config={"dllm": dllm}
    )
    decode = get_decode_config(config)
    limits = 20, config.scheduler_config.max_num_batched_tokens
    sizes = capture_sizes(decode, *limits)
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    manager: Any = BlockGraphManager(config, CPU, CUDAGraphMode.NONE, 8)
    manager.cudagraph_mode = BOTH
    manager._init_candidates()
    manager._graphs_captured = True
    table = uniform_graphs(decode, sizes, *limits)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    found = {(desc.uniform_token_count, desc.num_reqs) for desc in captured}
    assert found == {(width, n) for width, some in table.items() for n in some}
    tokens = [desc.num_tokens for desc in captured]
    assert tokens == sorted(tokens, reverse=True)
    for width in range(1, 9):
        for requests in range(1, 21):
            fits = [n for n in table.get(width, ()) if n >= requests]
            desc = manager.dispatch(requests, requests * width, width, 0, width)
            if fits:
                wanted = (CUDAGraphMode.FULL, fits[0] * width, fits[0], width)
                assert desc == BatchExecutionDescriptor(*wanted), (width, requests)
            else:
                assert desc.cg_mode == CUDAGraphMode.PIECEWISE
    # Requests with widths of their own.
    assert manager.dispatch(3, 12, None, 0, 6).cg_mode == CUDAGraphMode.PIECEWISE


def test_the_log_says_how_many(
    vllm_config_for: Any,
    checkpoints: Any,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
) -> None:
    dllm = {
        "adaptive": "throughput",
        "block_length": 8,
        "canvas_length": 8,
        "min_window": 2,
    }
    config = vllm_config_for(
        checkpoints / "tiny-sdar", max_num_seqs=20, additional_config={"dllm": dllm}
    )
    for name in ("can_capture", "current_platform.is_cpu"):
        answer = name == "can_capture"
        monkeypatch.setattr(
            f"dllm_plugin.config.cuda_graphs.{name}", lambda *_, a=answer: a
        )
    memory = "dllm_plugin.config.memory.current_platform.get_device_total_memory"
    monkeypatch.setattr(memory, lambda: 80 << 30)
    config.cache_config.gpu_memory_utilization = 0.9
    config.parallel_config.worker_cls, compilation = "auto", config.compilation_config
    compilation.cudagraph_mode, compilation.cudagraph_capture_sizes = BOTH, None
    compilation.max_cudagraph_capture_size = None
    decode = get_decode_config(config)
    logged.clear()
    set_graphs(config, decode)
    graphs = captured_graphs(config, decode)
    assert compilation.cudagraph_capture_sizes == list(ANY_SIZE) and max(graphs) == 8
    assert f"have {sum(map(len, graphs.values()))} full CUDA graphs" in "".join(logged)
    assert "for up to 20 requests" in "".join(logged)
    widths = widths_between(2, 8)
    assert set(allowed_widths(config, decode, widths)) == {
        n for c in graphs.values() for n in c
    }


@pytest.mark.parametrize("worker", ["auto", "a.Worker"])
def test_our_worker_captures_them(
    worker: str, vllm_config_for: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's graphs would be of whole canvases: then steps stay piecewise."""
    dllm = {"adaptive": "throughput"}
    config = vllm_config_for(
        checkpoints / "tiny-sdar", additional_config={"dllm": dllm}
    )
    monkeypatch.setattr(
        "dllm_plugin.config.cuda_graphs.can_capture", lambda vllm_config: True
    )
    config.parallel_config.worker_cls = worker
    config.compilation_config.cudagraph_mode = BOTH
    set_graphs(config, get_decode_config(config))
    ours = worker == "auto"
    assert config.parallel_config.worker_cls == (WORKER if ours else worker)
    wanted = BOTH if ours else CUDAGraphMode.PIECEWISE
    assert config.compilation_config.cudagraph_mode == wanted
