"""Committed tokens in the inputs of refreshes that start behind the prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dllm_plugin.decoding.full_attention import NO_LIMIT
from dllm_plugin.state.refreshed import write_committed, write_tails

CONTEXT = 12


def batch(computed: list[int], queries: list[int], drafts: list[int]) -> Any:
    return SimpleNamespace(
        num_reqs=len(computed),
        num_draft_tokens_per_req=np.array(drafts),
        query_start_loc_np=np.cumsum([0, *queries]),
        num_computed_tokens_np=np.array(computed),
        prefill_len_np=np.full(len(computed), 4),
        idx_mapping_np=np.arange(len(computed))[::-1].copy(),
        input_ids=torch.full((sum(queries),), -1, dtype=torch.int32),
    )


TOKENS_NL = torch.arange(2 * CONTEXT).view(2, CONTEXT)


def test_committed_tokens_stand_in_front_of_the_canvas() -> None:
    given = batch([5, 0], [6, 5], [4, 3])
    write_committed(given, TOKENS_NL)
    assert given.input_ids.tolist() == [CONTEXT + 5, CONTEXT + 6] + [-1] * 9


def test_positions_after_the_context_are_left_alone() -> None:
    """vLLM's warm-up computes such, on GPUs with every engine that has approximations."""
    given = batch([CONTEXT - 1, CONTEXT + 3], [4, 4], [1, 1])
    write_committed(given, TOKENS_NL)
    assert given.input_ids.tolist() == [2 * CONTEXT - 1] + [-1] * 7


def test_suffixes_longer_than_a_canvas_stand_after_it() -> None:
    """The second request has none that is longer: nothing of it is written."""
    given = batch([0, 5], [10, 4], [8, 4])
    write_tails(given, TOKENS_NL, np.array([7, NO_LIMIT]))
    assert given.input_ids.tolist() == [-1] * 7 + [19, 20, 21] + [-1] * 4
    given = batch([8, 0], [3, 4], [3, 4])
    write_tails(given, TOKENS_NL, np.array([9, 4]))
    assert given.input_ids.tolist() == [-1, 21, 22] + [-1] * 4
