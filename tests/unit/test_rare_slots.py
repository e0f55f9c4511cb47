"""What a slot keeps: rows that are read too far, suffixes of requests that are gone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.arguments import Template
from dllm_plugin.state.canvas_states import CanvasStates, with_spare_row
from dllm_plugin.state.request_table import Templates


@pytest.mark.parametrize("length", [1, 24, 96, 128])
def test_the_last_row_can_be_read_up_to_a_power_of_two(length: int) -> None:
    rows = torch.arange(3 * length).view(3, length)
    spared = with_spare_row(rows)
    assert torch.equal(spared, rows) and spared.stride() == rows.stride()
    read_until = 2 * length + (1 << (length - 1).bit_length())
    assert spared.untyped_storage().nbytes() >= read_until * spared.element_size()


def test_a_slot_forgets_its_suffix() -> None:
    """A slot without a request is not written in every step."""
    templates = Templates(torch.zeros(2, 4, dtype=torch.int64))
    templates.add_request(1, Template((FILL, FILL, 7, FILL, 9, 9, 9)), 14)
    assert templates.tails == {1: (9, 9, 9)}
    states: Any = SimpleNamespace(
        req_id_to_slot={"a": 1}, preempted=None, templates=templates
    )
    assert CanvasStates.remove_request(states, "a") == 1
    assert not templates.tails
    templates.add_request(1, None, 0)
    assert not templates.tails and not templates.has_np[1]
