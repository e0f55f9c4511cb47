"""Every worker for CPUs asks Linux for AMX tiles before vLLM sets up its device.

Torch's two functions are replaced, so that the tests need no AMX.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from dllm_plugin.engine.platforms import request_tiles
from dllm_plugin.engine.worker.cpu_worker import DiffusionCPUWorker
from dllm_plugin.omni.workers import ARWorker, DiffusionWorker

SIZES_WITH_TILES, SIZES_WITHOUT = (32, 64, 128), (80, 112)


class InitReached(Exception):
    """Ends a start when vLLM's own part of it begins."""


def model(dtype: torch.dtype = torch.bfloat16, head_size: int = 64) -> Any:
    return SimpleNamespace(dtype=dtype, get_head_size=lambda: head_size)


@pytest.fixture
def events() -> list[str]:
    """What has happened so far, in order."""
    return []


def cpu(
    monkeypatch: pytest.MonkeyPatch, events: list[str], has_amx: bool, permitted: bool
) -> None:
    def ask() -> bool:
        events.append("asked")
        return permitted

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_init_amx", ask)


def test_torch_has_both_functions() -> None:
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    assert isinstance(torch.cpu._init_amx(), bool)


@pytest.mark.parametrize(("has_amx", "asked"), [(True, ["asked"]), (False, [])])
def test_only_a_cpu_with_amx_asks(
    has_amx: bool, asked: list[str], events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu(monkeypatch, events, has_amx, permitted=True)
    request_tiles(model())
    assert events == asked


@pytest.mark.parametrize("head_size", SIZES_WITH_TILES)
def test_a_refusal_is_one_sentence(
    head_size: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu(monkeypatch, events, has_amx=True, permitted=False)
    with pytest.raises(ValueError, match="use --dtype float32"):
        request_tiles(model(head_size=head_size))


@pytest.mark.parametrize(
    "needs_none",
    [
        *(model(head_size=size) for size in SIZES_WITHOUT),
        model(torch.float32),
        model(torch.float16),
    ],
)
def test_a_refusal_without_need_is_ignored(
    needs_none: Any, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu(monkeypatch, events, has_amx=True, permitted=False)
    request_tiles(needs_none)
    assert events == ["asked"]


@pytest.mark.parametrize("worker_cls", [DiffusionCPUWorker, ARWorker, DiffusionWorker])
def test_workers_ask_before_vllm_sets_up(
    worker_cls: type, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init_device(self: Any) -> None:
        events.append("vLLM's init_device")
        raise InitReached

    cpu(monkeypatch, events, has_amx=True, permitted=True)
    monkeypatch.setattr(CPUWorker, "init_device", init_device)
    monkeypatch.setattr(worker_cls, "check", lambda self: None, raising=False)
    worker: Any = worker_cls.__new__(worker_cls)
    worker.model_config = model()
    with pytest.raises(InitReached):
        worker.init_device()
    assert events == ["asked", "vLLM's init_device"]
