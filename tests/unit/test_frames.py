"""Snapshots to frames: differences, drops, parts of characters, ends."""

from collections.abc import Sequence

import numpy as np
import pytest

from dllm_plugin.api.frames import BROKEN, Frames
from dllm_plugin.config.carriers import Snapshot

A, B, EURO = 65, 66, list("€".encode())  # a token is a byte


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def snapshot(start: int, final: int, ids: list[int], forward: int = 1) -> Snapshot:
    """Confidence 0.5 wherever there is a token."""
    certain = [None if i < 0 else 0.5 for i in ids]
    return Snapshot("", forward, start, final, ids, certain)


def test_only_what_changed_is_sent() -> None:
    frames = Frames(decode)
    first = frames.frame(snapshot(0, 0, [-1, A, -1, B]))
    assert first["set"] == [[1, "A", 0.5], [3, "B", 0.5]] and first["unset"] == []
    assert (first["start"], first["length"], first["final"]) == (0, 4, 0)
    second = frames.frame(snapshot(0, 0, [-1, A, A, B], forward=2))
    assert second["set"] == [[2, "A", 0.5]] and second["forward"] == 2
    back = frames.frame(
        snapshot(0, 0, [B, -1, -1, -1])
    )  # a preempted block starts again
    assert back["set"] == [[0, "B", 0.5]] and back["unset"] == [1, 2, 3]


def test_counts_of_drafts_are_sent_if_a_forward_judges_any() -> None:
    frames, first = Frames(decode), snapshot(0, 0, [-1, A])
    assert "drafted_tokens" not in frames.frame(first)
    frame = frames.frame(first._replace(drafts=(7, 5)))
    assert (frame["drafted_tokens"], frame["accepted_tokens"]) == (7, 5)


def test_positions_of_frames_that_were_dropped_come_with_the_text() -> None:
    frames = Frames(decode)
    frames.frame(snapshot(0, 0, [-1, A, -1, -1]))
    frames.tokens.extend([B, A, B, A])
    after = frames.frame(snapshot(4, 4, [-1, B, -1, -1]))
    assert after["set"] == [
        [0, "B", None],
        [2, "B", None],
        [3, "A", None],
        [5, "B", 0.5],
    ]
    assert after["unset"] == []


def test_parts_of_a_character_are_set_again_when_it_is_whole() -> None:
    frames = Frames(decode)
    parts = frames.frame(snapshot(0, 0, [A, EURO[0], -1, EURO[2]]))
    assert parts["set"] == [[0, "A", 0.5], [1, BROKEN, 0.5], [3, BROKEN, 0.5]]
    frames.tokens.extend([A, *EURO])
    whole = frames.frame(snapshot(4, 4, [-1]))
    assert whole["set"] == [[1, "€", 0.5], [2, "", None], [3, "", 0.5]]


def test_what_lies_after_a_stop_string_goes() -> None:
    frames = Frames(decode)
    frames.frame(snapshot(0, 0, [A, -1, B, B]))
    frames.tokens.extend([A, B])
    frames.ended = True
    end = frames.frame(snapshot(0, 4, [A, B, B, B]))
    assert end["set"] == [[1, "B", 0.5]] and end["unset"] == [2, 3]
    assert (end["length"], end["final"]) == (2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_replayed_frames_are_the_text(seed: int) -> None:
    """Random canvases, any of whose snapshots may be lost."""
    draw = np.random.default_rng(seed)
    text = [byte for kind in draw.integers(0, 3, 40) for byte in ([A], [B], EURO)[kind]]
    frames, shown, start = Frames(decode), {}, 0
    while start < len(text):
        size, decided = min(12, len(text) - start), set[int]()
        while len(decided) < size:
            decided |= {int(i) for i in draw.integers(0, size, 3)}
            ids = [text[start + i] if i in decided else -1 for i in range(size)]
            if draw.random() < 0.5:
                frame = frames.frame(snapshot(start, start, ids))
                for position in frame["unset"]:
                    del shown[position]
                shown |= {position: part for position, part, _ in frame["set"]}
        frames.tokens.extend(text[start : start + size])
        start += size
    frames.ended = True
    last = frames.frame(snapshot(start, start, []))
    shown |= {position: part for position, part, _ in last["set"]}
    joined = "".join(shown[i] for i in range(len(text)))
    assert joined == decode(text)
