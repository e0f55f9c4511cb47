"""Split canvases into run, window and rest: a Triton kernel, and its plain-torch reference.

A launch before the forward, since the host does not know where a run ends.

R requests, C canvas positions, N slots, P parts of a window at most, B = R * (P + 2) sequences:
those of a canvas are its run, the parts of its window and its rest, which may be empty.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton


class Rules(NamedTuple):
    """List the layout rules of all canvases of an engine.

    length   positions of a block: a window is cut after so many, and a text ends with a whole one
    on_grid  blocks lie at multiples of their length, and no window goes on after the end of one
    context  positions of the longest text
    """

    length: int
    on_grid: bool
    context: int
    mask_id: int


class Texts(NamedTuple):
    """List int64 absolute positions of texts: canvas, first block, the most asked for."""

    start: Tensor
    origin: Tensor
    end: Tensor


class Split(NamedTuple):
    """List canvas positions, int64 ``[R]``.

    run    leading decided positions that are computed: their KV becomes final
    first  the first mask, or C
    limit  where a window ends at most: with the text or, on a grid, with a block
    """

    run: Tensor
    first: Tensor
    limit: Tensor


def split(tokens_RC: Tensor, texts: Texts, computed_R: Tensor, rules: Rules) -> Split:
    """Split canvases of which a forward computes the first `computed_R` positions, int64."""
    num_positions = tokens_RC.shape[1]
    position_C = torch.arange(num_positions, device=tokens_RC.device)
    is_mask_RC = tokens_RC == rules.mask_id
    first_R = torch.where(is_mask_RC, position_C, num_positions).amin(dim=1)
    blocks_R = (texts.end - texts.origin + rules.length - 1) // rules.length
    stop_R = (texts.origin + blocks_R * rules.length).clamp_max(rules.context)
    if rules.on_grid:
        block_R = (texts.start + first_R) // rules.length
        stop_R = torch.minimum(stop_R, (block_R + 1) * rules.length)
    return Split(torch.minimum(first_R, computed_R), first_R, stop_R - texts.start)


def stops(found: Split, computed_R: Tensor, length: int, parts: int) -> Tensor:
    """Return where run, parts of the window and rest end, int64 ``[R, P + 2]``."""
    window_R = torch.maximum(torch.minimum(found.limit, computed_R), found.run)
    steps_P = torch.arange(parts + 1, device=computed_R.device) * length
    inner_RP = torch.minimum(found.run[:, None] + steps_P, window_R[:, None])
    return torch.cat([inner_RP, computed_R[:, None]], dim=1)


@triton.jit
def _lay_out(
    canvas_ptr,
    canvas_stride,
    slot_ptr,
    start_ptr,
    origin_ptr,
    end_ptr,
    query_start_ptr,
    seq_lens_ptr,
    start_loc_ptr,
    keys_ptr,
    num_positions,
    length,
    context,
    mask_id,
    num_sequences,
    ON_GRID: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    low = tl.load(query_start_ptr + request)
    high = tl.load(query_start_ptr + request + 1)
    computed = (high - low).to(tl.int64)
    position = tl.arange(0, TILE)
    inside = position < num_positions
    tokens = tl.load(canvas_ptr + slot * canvas_stride + position, mask=inside, other=0)
    is_mask = inside & (tokens == mask_id)
    first = tl.min(tl.where(is_mask, position, num_positions), axis=0).to(tl.int64)
    run = tl.minimum(first, computed)

    start = tl.load(start_ptr + slot)
    origin = tl.load(origin_ptr + slot)
    blocks = (tl.load(end_ptr + slot) - origin + length - 1) // length
    stop = tl.minimum(origin + blocks * length, context)
    if ON_GRID:
        stop = tl.minimum(stop, ((start + first) // length + 1) * length)
    window = tl.maximum(tl.minimum(stop - start, computed), run)

    # Sequence i ends where its range does; the last sequence gets what is left.
    i = tl.arange(0, SEQUENCES)
    ends = tl.where(
        i == num_sequences - 1, computed, tl.minimum(run + i * length, window)
    )
    begins = tl.where(i == 0, 0, tl.minimum(run + (i - 1) * length, window))
    keys = tl.load(seq_lens_ptr + request) - computed + ends
    place = request * num_sequences + i
    tl.store(start_loc_ptr + place, (low + begins).to(tl.int32), mask=i < num_sequences)
    tl.store(keys_ptr + place, keys.to(tl.int32), mask=i < num_sequences)
    if request == tl.num_programs(0) - 1:
        tl.store(start_loc_ptr + (request + 1) * num_sequences, high)


def lay_out(
    canvas_NC: Tensor,
    slots_R: Tensor,
    texts_N: Texts,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rules: Rules,
    start_loc_B: Tensor,
    keys_B: Tensor,
) -> None:
    """Write what the reference writes; the last axis of the canvases must be dense."""
    num_reqs, num_positions = len(slots_R), canvas_NC.shape[1]
    num_sequences = len(keys_B) // num_reqs
    _lay_out[(num_reqs,)](
        canvas_NC,
        canvas_NC.stride(0),
        slots_R,
        *texts_N,
        query_start_loc,
        seq_lens,
        start_loc_B,
        keys_B,
        num_positions,
        rules.length,
        rules.context,
        rules.mask_id,
        num_sequences,
        ON_GRID=rules.on_grid,
        TILE=triton.next_power_of_2(num_positions),
        SEQUENCES=triton.next_power_of_2(num_sequences),
        num_warps=1,
    )


def lay_out_reference(
    canvas_NC: Tensor,
    slots_R: Tensor,
    texts_N: Texts,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    rules: Rules,
    start_loc_B: Tensor,
    keys_B: Tensor,
) -> None:
    """Write where the sequences of canvases begin and how many keys each sees.

    Args:
        query_start_loc: int32 ``[R + 1]``, first token of each canvas in the forward.
        seq_lens: int32 ``[R]``, keys up to the last computed position of each canvas.
        start_loc_B: int32 ``[B + 1]``; its last entry becomes the number of tokens.
        keys_B: int32 ``[B]``.
    """
    computed_R = query_start_loc.diff().to(torch.int64)
    texts = Texts(*(table[slots_R] for table in texts_N))
    found = split(canvas_NC[slots_R], texts, computed_R, rules)
    num_parts = len(keys_B) // len(slots_R) - 2
    stops_RB = stops(found, computed_R, rules.length, num_parts)
    keys_B.copy_(((seq_lens - computed_R)[:, None] + stops_RB).flatten())
    starts_RB = query_start_loc[:-1, None] + torch.cat(
        [torch.zeros_like(stops_RB[:, :1]), stops_RB[:, :-1]], dim=1
    )
    start_loc_B[:-1].copy_(starts_RB.flatten())
    start_loc_B[-1:].copy_(query_start_loc[-1:])
