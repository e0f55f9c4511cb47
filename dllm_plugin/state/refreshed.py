"""Write tokens to the inputs of forwards that vLLM leaves out.

vLLM writes a request's tokens into a forward's inputs where the forward starts inside of its
prompt, and only drafts if it does not. A refresh that starts after the prompt computes
committed tokens, too. And what is given after a last gap may be longer than the canvas.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.causal_rows import position_of_row

from .canvas_states import CanvasStates, count_canvases

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


def write_committed(batch: "InputBatch", all_token_ids_NL: Tensor) -> None:
    """Write them into ``batch.input_ids``, from each slot's tokens by position."""
    num_reqs = batch.num_reqs
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        return
    bounds = batch.query_start_loc_np[: num_reqs + 1].astype(np.int64)
    computed = batch.num_computed_tokens_np[:num_reqs].astype(np.int64)
    past_prompt = computed >= batch.prefill_len_np[:num_reqs]
    counts = np.where(past_prompt, np.diff(bounds) - drafts[:num_reqs], 0)
    _write(batch, all_token_ids_NL, counts, bounds[:-1], computed)


def positions_of_rows(batch: "InputBatch", states: CanvasStates) -> Tensor:
    """Return which canvas position each canvas row of a window's forward is, int64 ``[T]``."""
    slots_R = batch.idx_mapping[: count_canvases(batch)]
    canvas_NC = states.canvas_NC
    mask_id = states.config.mask_token_id
    order_NC = torch.zeros_like(canvas_NC)
    order_NC[slots_R] = position_of_row(canvas_NC[slots_R], mask_id)
    return order_NC[batch.expanded_idx_mapping, batch.expanded_local_pos]


def write_reordered(batch: "InputBatch", states: CanvasStates) -> None:
    """Write tokens and positions of canvases in the order of their rows; slots stay by row."""
    if not count_canvases(batch):
        return
    slot_T = batch.expanded_idx_mapping
    place_T = positions_of_rows(batch, states)
    count = len(place_T)
    ids = batch.input_ids
    positions = batch.positions
    ids[:count] = states.canvas_NC[slot_T, place_T].to(ids.dtype)
    positions[:count] = (states.start_N[slot_T] + place_T).to(positions.dtype)


def write_tails(
    batch: "InputBatch", all_token_ids_NL: Tensor, starts: np.ndarray
) -> None:
    """Write the tokens of suffixes, from the positions `starts` on, int64 ``[R]``."""
    num_reqs = batch.num_reqs
    bounds = batch.query_start_loc_np[: num_reqs + 1].astype(np.int64)
    computed = batch.num_computed_tokens_np[:num_reqs].astype(np.int64)
    first = starts[:num_reqs]
    counts = np.clip(computed + np.diff(bounds) - first, 0, None)
    _write(batch, all_token_ids_NL, counts, bounds[1:] - counts, first)


def _write(
    batch: "InputBatch",
    all_token_ids_NL: Tensor,
    counts: np.ndarray,
    first_row: np.ndarray,
    first: np.ndarray,
) -> None:
    """Write `counts` tokens of each request, int64 ``[R]``.

    Args:
        first_row: row of the batch at which the tokens of a request begin.
        first: position of the first token.
    """
    if not counts.any():
        return
    known_NL, ids = all_token_ids_NL, batch.input_ids
    before = np.repeat(counts.cumsum() - counts, counts)
    offset = np.arange(len(before)) - before
    rows = np.repeat(first_row, counts) + offset
    positions = np.repeat(first, counts) + offset
    slots = np.repeat(batch.idx_mapping_np[: batch.num_reqs], counts)
    packed = np.stack([rows, positions, slots])
    # vLLM's warm-up computes positions after the context.
    packed = packed[:, positions < known_NL.shape[1]].astype(np.int64)
    row_T, place_T, slot_T = async_tensor_h2d(packed, device=known_NL.device)
    ids[row_T] = known_NL[slot_T, place_T].to(ids.dtype)
