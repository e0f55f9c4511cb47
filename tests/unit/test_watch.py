"""``diffuplug watch``: what is drawn, and frames of a server."""

from typing import Any

import pytest

from dllm_plugin.commands.watch import Shown, _apply, colour, drawn


def test_final_text_is_plain_and_masks_are_dots() -> None:
    text = drawn(Shown("done", [(" a", 1.0), None, ("b", 0.0), ("c", None)]))
    assert text.plain == "done a\N{MIDDLE DOT}bc"
    assert [(s.start, s.end, s.style) for s in text.spans] == [
        (4, 6, "rgb(60,170,80)"),
        (6, 7, "dim"),
        (7, 8, "rgb(205,60,60)"),
    ]
    assert colour(0.5) == "rgb(132,115,70)"


def test_frames_of_a_server() -> None:
    shown, positions = Shown(), dict[int, Any]()
    frame = {
        "forward": 3,
        "start": 0,
        "length": 3,
        "final": 0,
        "set": [[1, "x", 0.5]],
        "unset": [],
    }
    _apply(frame, positions, shown)
    assert shown.canvas == [None, ("x", 0.5), None] and shown.forwards == 3
    behind = {
        "forward": 4,
        "start": 2,
        "length": 2,
        "final": 2,
        "set": [[3, "y", 1.0]],
        "unset": [1],
    }
    _apply(behind, positions, shown)
    assert shown.canvas == [None, ("y", 1.0)]
    _apply({"forwards": 4, "tokens": 4}, positions, shown)
    assert shown.forwards == 4 and len(shown.canvas) == 2


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    from dllm_plugin.commands import watch

    monkeypatch.setitem(watch.sys.modules, "rich", None)
    with pytest.raises(ValueError, match="pip install rich"):
        watch.run(Namespace())
