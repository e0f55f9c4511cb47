"""Test what an engine reserves on GPUs of little memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from dllm_plugin.config.cuda_graphs import set_capture_sizes
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.memory import chunk_rows, is_small_card, usable_bytes
from dllm_plugin.config.scheduling import set_scheduler
from dllm_plugin.engine.worker import ranks
from dllm_plugin.models import register_configs

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
GIB = 1 << 30
LLADA = 126464  # columns


@pytest.mark.parametrize(
    ("usable", "columns", "rows"),
    [
        (80 * GIB, LLADA, 256),
        (24 * GIB, LLADA, 192),
        (12 * GIB, LLADA, 96),
        (int(7.75 * GIB), LLADA, 64),
        (int(7.75 * GIB), 32000, 256),
        (GIB, LLADA, 32),
    ],
)
def test_copies_of_rows_take_a_share_of_the_memory(
    usable: int, columns: int, rows: int
) -> None:
    assert chunk_rows(columns, usable) == rows
    if rows > 32:
        assert 8 * rows * columns * 4 < 0.035 * usable


def engine_on(
    monkeypatch: pytest.MonkeyPatch, gib: float, share: float, **limits: int
) -> VllmConfig:
    """Configure an engine, and from then on pretend that the device is a GPU of `gib`."""
    register_configs()
    options = EngineArgs(str(CHECKPOINTS / "tiny-llada"), max_model_len=256)
    vllm_config = options.create_engine_config()
    vllm_config.cache_config.gpu_memory_utilization = share
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    size = int(gib * GIB)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: size)
    tokens, requests = EngineArgs.get_batch_defaults(1)
    given = {
        "max_num_seqs": max(requests.values()),
        "max_num_batched_tokens": max(tokens.values()),
    } | limits
    for name, value in given.items():
        setattr(vllm_config.scheduler_config, name, value)
    return vllm_config


@pytest.mark.parametrize(
    ("gib", "share", "small"),
    [
        (80, 0.92, False),
        (15.6, 0.92, False),
        (14.75, 0.92, True),
        (12, 0.92, True),
        (139.8, 8 / 139.8, True),
        (24, 0.4, True),
    ],
)
def test_what_vllm_may_use_decides_whether_a_card_is_small(
    monkeypatch: pytest.MonkeyPatch, gib: float, share: float, small: bool
) -> None:
    vllm_config = engine_on(monkeypatch, gib, share)
    assert is_small_card(vllm_config) == small
    set_scheduler(vllm_config, get_decode_config(vllm_config))
    scheduler = vllm_config.scheduler_config
    compilation = vllm_config.compilation_config
    compilation.cudagraph_capture_sizes = compilation.max_cudagraph_capture_size = None
    compilation.cudagraph_mode = None
    assert set_capture_sizes(vllm_config, get_decode_config(vllm_config))
    largest = max(compilation.cudagraph_capture_sizes or [])
    if small:
        assert scheduler.max_num_seqs == 16
        assert scheduler.max_num_batched_tokens == 2048
        assert largest == 256
    else:
        assert scheduler.max_num_seqs >= 256
        assert scheduler.max_num_batched_tokens >= 8192
        assert largest == 1024


def test_limits_that_are_no_defaults_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"max_num_seqs": 40, "max_num_batched_tokens": 3000}
    vllm_config = engine_on(monkeypatch, 8, 0.92, **limits)
    set_scheduler(vllm_config, get_decode_config(vllm_config))
    for name, value in limits.items():
        assert getattr(vllm_config.scheduler_config, name) == value


def test_a_given_number_of_bytes_leaves_the_share_without_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_config = engine_on(monkeypatch, 80, 0.05)
    assert usable_bytes(vllm_config) == int(0.05 * 80 * GIB)
    vllm_config.cache_config.kv_cache_memory_bytes = GIB
    assert usable_bytes(vllm_config) == 80 * GIB


def test_ranks_on_unlike_cards_take_the_rows_of_the_smallest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes whose options are the same start, and exchange equally many pieces."""
    vllm_config = engine_on(monkeypatch, 80, 0.92)
    ours: Any = vllm_config.additional_config
    rows, other = 96, {"seed": "0"}

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        found[:] = [mine, (rows, mine[1] | other)]

    world = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr(ranks, "get_world_group", lambda: world)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    ranks.compare_options(vllm_config)
    assert get_decode_config(vllm_config).rows_at_once == 96
    ours["dllm"]["rows_at_once"] = 64
    ranks.compare_options(vllm_config)
    assert get_decode_config(vllm_config).rows_at_once == 64
    for name in ("max_num_seqs", "max_num_batched_tokens", "seed", "canvas_length"):
        kept = other.copy()
        other[name] = "8"
        with pytest.raises(ValueError, match=f"rank 1 was started with {name} 8, rank"):
            ranks.compare_options(vllm_config)
        other = kept


def test_a_lowered_budget_still_holds_a_refresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must equal one of vLLM's defaults, which are raised to the context."""
    vllm_config = engine_on(monkeypatch, 12, 0.92)
    vllm_config.model_config.max_model_len = 4096
    config = get_decode_config(vllm_config)
    assert config.method.full_attention
    set_scheduler(vllm_config, config)
    assert vllm_config.scheduler_config.max_num_batched_tokens == 4096
