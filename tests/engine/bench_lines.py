"""Arguments of quick measurements, and the line of JSON that each prints last."""

import json
from typing import Any

import heap
import pytest
from engines import EngineRoom

from diffuplug_bench.step import floor

QUICK = ["--enforce-eager", "--seed", "3"]


def line_of(printed: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    assert {"benchmark", "command", "seed", "settings", "hardware", "versions"} <= set(
        line
    )
    return line


def quiet_start(room: EngineRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the shared engine: commands start their own, and collect garbage around each."""
    monkeypatch.setattr(floor, "SECONDS", 0.02)  # what is timed here is tiny
    import vllm.v1.worker.cpu_worker  # noqa: F401 - what it imports is frozen, too

    room.close()
    heap.freeze()
