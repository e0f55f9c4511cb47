"""Kernels launch, but not while they are only compiled."""

from typing import Any

import pytest
import torch


@pytest.mark.parametrize(("name", "moved"), [("move_ahead", 0), ("move_behind", 2)])
def test_kernels_run_only_after_a_warm_up(
    name: str, moved: int, interpreter: Any
) -> None:
    rows = torch.tensor([0, 1])
    arguments = [
        torch.ones(2, 9),
        rows,
        torch.zeros(3, 9),
        rows,
        torch.tensor([True, True]),
    ]
    [(_, arguments)] = interpreter.run([(f"ahead.{name}", None, arguments, {})])
    assert arguments[2].sum() == moved * 9
