"""Plan and commit the steps of full attention, and say where the next forward starts and stops.

Every position sees every other, so KV is refreshed: recomputed, at the latest when a block is
done. ``plan_*`` and ``commit_*`` as in :mod:`dllm_plugin.decoding.block_causal`. ``span_*`` say on
the host what the next forward of a request computes; the host learns where the canvas starts from
what was committed, by the same functions (:func:`bounds`) from which the device derives its canvas.
Definitions: LLaDA ``generate.py``, Dream ``generation_utils.py`` and Fast-dLLM (arXiv 2505.22618)
``generate.py``, ``generation_utils_block.py``.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.block_causal import final_run, without_edits
from dllm_plugin.decoding.blocks import at_positions
from dllm_plugin.decoding.plan import Canvas, StepOutcome, StepPlan, replaced


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
    return replaced(plan_current_block(canvas, mask_id), first_only_R=canvas.step_R == 0)


def commit_refreshed(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
    mask_id: int,
) -> StepOutcome:
    """Commit the block when it is decided; its KV and all others are then out of date.

    Arguments and exact early exit as in :func:`dllm_plugin.decoding.block_causal.commit_blocks`.
    """
    run_R, final_R = final_run(canvas, plan, tokens_RC, is_stop_RC, remaining_R, mask_id)
    ends_R = run_R >= final_R
    done_R = run_R >= canvas.size_RS[:, 0]
    num_committed_R = torch.where(ends_R, final_R, torch.where(done_R, run_R, 0))
    return StepOutcome(
        unmask_RC,
        num_committed_R.masked_fill(canvas.ended_R, 0).to(torch.int32),
        done_R | ends_R,
        canvas.ended_R | ends_R,
    )


class Bounds(NamedTuple):
    """Hold absolute positions of full-attention requests, int ``[R]``.

    first      where the text of this canvas begins; everything before is its prompt
    start      first undecided position: where the canvas starts
    block_stop end of its current block
    stop       end of everything that is computed
    """

    first: np.ndarray
    start: np.ndarray
    block_stop: np.ndarray
    stop: np.ndarray


def bounds(
    prompt_len: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    block_length: np.ndarray,
    canvas_length: int,
    max_model_len: int,
) -> Bounds:
    """Place a canvas; `end` is where the text may end at most, prompt included.

    What was asked for is rounded up to whole blocks. More than `canvas_length` positions are
    decoded canvas by canvas, each with everything before it as its prompt.
    """
    most = canvas_length // block_length * block_length
    first = prompt_len + (start - prompt_len) // most * most
    whole = -((first - end) // block_length) * block_length
    stop = np.minimum(first + np.minimum(whole, most), max_model_len)
    return Bounds(first, start, np.minimum(start + block_length, stop), stop)


Span = tuple[np.ndarray, np.ndarray]  # where next forwards start and stop, int ``[R]``


def span_semi_autoregressive(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Compute everything in every step (LLaDA ``generate.py``, Dream ``generation_utils.py``)."""
    return np.zeros_like(canvas.stop), canvas.stop


def span_prefix_cache(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Compute the current block and everything behind it, after a refresh."""
    return np.where(keeps_kv, canvas.start, 0), canvas.stop


def span_dual_cache(canvas: Bounds, keeps_kv: np.ndarray) -> Span:
    """Compute the current block alone, after a refresh."""
    return np.where(keeps_kv, canvas.start, 0), np.where(keeps_kv, canvas.block_stop, canvas.stop)
