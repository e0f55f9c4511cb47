"""Plan and commit the steps of full attention, and place the next forward.

Every position sees every other, so KV is refreshed: recomputed, at the latest when a block is
done. ``plan_*`` and ``commit_*`` as in :mod:`dllm_plugin.decoding.block_causal`. ``span_*``
find on the host what the next forward of a request computes; the host learns where the canvas
starts from what was committed, by the same functions (:func:`bounds`) as the device.
Definitions: LLaDA ``generate.py``, Dream ``generation_utils.py`` and Fast-dLLM (arXiv 2505.22618)
``generate.py``, ``generation_utils_block.py``.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .block_causal import without_edits
from .blocks import at_positions, leading
from .plan import Canvas, StepOutcome, StepPlan, replaced


def plan_current_block(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan the current block of a canvas that is seen as a whole; other blocks wait as masks."""
    active_RS = (canvas.size_RS > 0) & canvas.computed_RS
    in_block_RC = at_positions(active_RS, canvas.block_RC)
    none_R = torch.zeros_like(canvas.open_R)
    return without_edits(
        canvas,
        open_R=none_R + 1,
        active_RS=active_RS,
        full_RS=active_RS,
        candidates_RC=(canvas.tokens_RC == mask_id) & in_block_RC,
        num_stored_R=none_R.to(torch.int64),
        num_committed_R=none_R,
    )


def plan_first_position(canvas: Canvas, mask_id: int) -> StepPlan:
    """Plan as :func:`plan_current_block`, but a block's first step decides only its first position.

    Fast-dLLM's decoder for shifted models: later steps of the block do not compute the row that
    predicts this position.
    """
    return replaced(
        plan_current_block(canvas, mask_id), first_only_R=canvas.step_R == 0
    )


def commit_refreshed(
    canvas: Canvas, plan: StepPlan, unmask_RC: Tensor, run_R: Tensor, final_R: Tensor
) -> StepOutcome:
    """Commit the block when it is decided; its KV and all others are then out of date.

    Arguments and exact early exit as in :func:`dllm_plugin.decoding.block_causal.commit_blocks`.
    """
    ends_R = run_R >= final_R
    done_R = run_R >= canvas.size_RS[:, 0]
    num_committed_R = torch.where(ends_R, final_R, torch.where(done_R, run_R, 0))
    return StepOutcome(
        unmask_RC,
        num_committed_R.masked_fill(canvas.ended_R, 0).to(torch.int32),
        # A forward of a text that has ended leaves no trace: it may lie anywhere.
        (done_R | ends_R) & ~canvas.ended_R,
        canvas.ended_R | ends_R,
    )


NO_LIMIT = 2**40  # positions: as many as there are
NO_TEMPLATE = -1  # default of :attr:`Layout.tail`


def limit(positions: int | None) -> int:
    """Return a number of positions, NO_LIMIT for none."""
    return NO_LIMIT if positions is None else positions


def without_void(plan: StepPlan, is_void_R: Tensor) -> StepPlan:
    """Disable forwards launched for an already finished block.

    Nothing of the canvas changes then, and computed positions fall back to where they were.
    """
    goes_on_R1 = ~is_void_R[:, None]
    return replaced(
        plan,
        active_RS=plan.active_RS & goes_on_R1,
        full_RS=plan.full_RS & goes_on_R1,
        candidates_RC=plan.candidates_RC & goes_on_R1,
    )


def without_given(
    plan: StepPlan, canvas: Canvas, given_RC: Tensor
) -> tuple[StepPlan, Canvas]:
    """Subtract given tokens from block sizes, on which quotas rest.

    A block whose first position is given needs no step of its own for it.
    """
    given_R = (given_RC & (canvas.block_RC == 0)).sum(dim=1, dtype=torch.int32)
    plan = replaced(plan, first_only_R=plan.first_only_R & ~given_RC[:, 0])
    return plan, canvas._replace(size_RS=canvas.size_RS - given_R[:, None])


def commit_given(
    canvas: Canvas,
    outcome: StepOutcome,
    tokens_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> StepOutcome:
    """Commit fully given blocks with the block before them: they need no forward."""
    goes_on_R = outcome.refresh_R & ~outcome.ended_R
    size_R = canvas.size_RS[:, 0].clamp_min(1)
    run_R = leading(tokens_RC != mask_id)
    # The last block may be shorter.
    ends_R = goes_on_R & (run_R >= remaining_R)
    run_R = torch.where(ends_R, remaining_R, run_R // size_R * size_R)
    num_committed_R = torch.where(goes_on_R, run_R, outcome.num_committed_R)
    return outcome._replace(
        num_committed_R=num_committed_R.to(torch.int32),
        ended_R=outcome.ended_R | ends_R,
    )


class Layout(NamedTuple):
    """List what the positions of a request's forwards depend on, int64 ``[R]``.

    prompt_len         where its answer begins
    end                where its text may end at most, prompt included
    block_length       positions of a block
    full_refresh_every of so many refreshes one starts at 0
    refresh_before     how far before their block the others start
    suffix_window      positions after the current block that exist
    tail               tokens given after `end`; NO_TEMPLATE if nothing is given
    """

    prompt_len: np.ndarray
    end: np.ndarray
    block_length: np.ndarray
    full_refresh_every: np.ndarray
    refresh_before: np.ndarray
    suffix_window: np.ndarray
    tail: np.ndarray = np.array(-1)


class Bounds(NamedTuple):
    """List absolute positions of full-attention requests, int ``[R]``.

    first      where the text of this canvas begins; everything before is its prompt
    start      first undecided position: where the canvas starts
    block_stop end of its current block
    stop       end of everything that is computed
    refresh    where the refresh starts that the current block begins with
    """

    first: np.ndarray
    start: np.ndarray
    block_stop: np.ndarray
    stop: np.ndarray
    refresh: np.ndarray


def bounds(
    layout: Layout,
    start: np.ndarray,
    canvas_length: int,
    max_model_len: int,
    exact_end: bool = False,
) -> Bounds:
    """Place canvases that begin at `start`.

    What was asked for is rounded up to whole blocks, unless `exact_end`. More than
    `canvas_length` positions are decoded canvas by canvas, each with everything before it as
    its prompt. A template is a single canvas, whose last block ends with its last gap.
    """
    prompt_len = layout.prompt_len
    block_length = layout.block_length
    most = canvas_length // block_length * block_length
    first = prompt_len + (start - prompt_len) // most * most
    whole = layout.end - first
    if not exact_end:
        whole = -(-whole // block_length) * block_length
    stop = np.minimum(first + np.minimum(whole, most), max_model_len)
    has_template = layout.tail != NO_TEMPLATE
    if has_template.any():
        first = np.where(has_template, prompt_len, first)
        stop = np.where(has_template, layout.end, stop)
    block_stop = np.minimum(start + block_length, stop)
    if has_template.any():
        stop = np.where(has_template, layout.end + layout.tail, stop)
    window_stop = np.minimum(stop, block_stop + layout.suffix_window)
    return Bounds(first, start, block_stop, window_stop, refresh_start(layout, start))


def refresh_start(layout: Layout, start: np.ndarray) -> np.ndarray:
    """Return where the refresh before the block at `start` begins; earlier KV stays.

    One of `full_refresh_every` blocks of an answer begins with a refresh of everything. The others
    trust keys and values before their refresh as earlier forwards left them (vicinity refresh of
    dInfer, arXiv 2510.08666; with only the answer, dLLM-Cache, arXiv 2506.06295).
    """
    block = (start - layout.prompt_len) // layout.block_length
    near = np.where(
        layout.refresh_before < NO_LIMIT,
        np.maximum(start - layout.refresh_before, 0),
        np.minimum(layout.prompt_len, start),
    )
    return np.where(block % layout.full_refresh_every == 0, 0, near)


Span = tuple[np.ndarray, np.ndarray]  # where next forwards start and stop, int ``[R]``


def span_semi_autoregressive(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Compute everything in every step (LLaDA ``generate.py``, Dream ``generation_utils.py``)."""
    return np.zeros_like(canvas.stop), canvas.stop


def span_prefix_cache(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Compute the current block and everything after it, once refreshed."""
    return np.where(keeps_kv, canvas.start, canvas.refresh), canvas.stop


def span_dual_cache(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Compute only the current block, once refreshed."""
    starts, _ = span_prefix_cache(canvas, keeps_kv)
    return starts, np.where(keeps_kv, canvas.block_stop, canvas.stop)
