"""What a full CUDA graph of floating canvases would read, in steps of real engines.

Steps of one width take the sequences of captured ones, from their persistent buffers.
"""

from typing import Any

import numpy as np
import pytest
from engines import EngineRoom, a_prompt, generate, params
from test_schedules import ENGINES, check, start

from dllm_plugin.attention.sequences import AttentionSequences
from dllm_plugin.state.canvas_states import count_canvases


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Requests and width of each step that took captured sequences."""
    eager, used = AttentionSequences.eager, set()

    def uniform(self: AttentionSequences, batch: Any, tables: Any) -> Any:
        spans = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
        if count_canvases(batch) < batch.num_reqs or len(set(spans.tolist())) > 1:
            return eager(self, batch, tables)
        used.add((batch.num_reqs, int(spans[0])))
        return self.captured(batch, tables)

    monkeypatch.setattr(AttentionSequences, "eager", uniform)
    return used


@pytest.mark.parametrize("name", ["llada-d2f", "dream-blocks", "sdar"])
def test_captured_sequences_equal_the_plain_loop(
    name: str, widths: set[tuple[int, int]], room: EngineRoom
) -> None:
    llm, canvas = start(room, name, overlapped=True), ENGINES[name][3]
    for width in sorted({2, 3, canvas // 2, canvas}):
        wanted = [(a_prompt(9 + 7 * i, i), 16 + i, [width]) for i in range(3)]
        wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
        outputs = generate(llm, [prompt for prompt, *_ in wanted], wishes)
        assert check(name, outputs, wanted) >= 2
        assert {(3, width), (1, width)} <= widths
