"""Define the tensors that describe one denoising step. Torch only.

Shape letters, here and in every file that uses them:
R requests of the step that have a canvas, C canvas positions, S block slots of a canvas,
T logits rows, V vocabulary.

A *canvas* is the window of C positions right of a request's committed tokens: ``start`` is its
first absolute position. *Blocks* of the request's own block length divide it from ``start`` on;
block slot i covers canvas positions ``[i * length, (i + 1) * length)``.

Cut what a forward computes into query segments, on the host. Numpy only.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor


class Canvas(NamedTuple):
    """Describe the requests of a step to strategies, before and after the forward.

    tokens_RC    int64, the mask id if undecided
    size_RS      int32, positions of each block slot; 0 if the slot has no block
    computed_RS  bool, all positions of the block slot are in this forward
    block_RC     int64, block slot of a position; S for positions of no block
    open_R       int32, number of open blocks (committed blocks have left the canvas)
    full_RS      bool, block is fully activated (must make progress every step)
    saw_stop_R   bool, a stop token was unmasked somewhere: no further block is opened
    ended_R      bool, the final text was emitted; only a step already in flight sees this
    step_R       int32, denoising steps that the first unfinished block has had
    block_add_threshold_R   float32, opens the next block when the last is this far decided
    decoded_token_threshold_R  float32, fully activates the next block
    max_active_R float32, blocks that block diffusion denoises at once
    sub_length_R int64, positions of a sub-block; 0 if blocks have none
    tail_R       int32, leading positions that belong to the prompt
    edits_R      bool, tokens of the first block may be replaced
    edits_left_R float32, how many more steps without masks may replace tokens
    """

    tokens_RC: Tensor
    size_RS: Tensor
    computed_RS: Tensor
    block_RC: Tensor
    open_R: Tensor
    full_RS: Tensor
    saw_stop_R: Tensor
    ended_R: Tensor
    step_R: Tensor
    block_add_threshold_R: Tensor
    decoded_token_threshold_R: Tensor
    max_active_R: Tensor
    sub_length_R: Tensor
    tail_R: Tensor
    edits_R: Tensor
    edits_left_R: Tensor


class StepPlan(NamedTuple):
    """Describe the decisions that need only the state before the forward.

    open_R          int32, open blocks of this step
    active_RS       bool, blocks that are denoised: open and not finished
    full_RS         bool, active blocks that must unmask at least one position
    candidates_RC   bool, masked positions of active blocks
    num_stored_R    int64, leading blocks computed without masks: the forward makes their KV final
    num_committed_R int32, positions of these blocks
    first_only_R    bool, this step decides the first position of its block and no other
    editable_RC     bool, decided positions whose token may be replaced
    checks_R        bool, the first block has no masks and commits unless a token is replaced
    fixed_R         int64, leading positions that no later step can edit
    """

    open_R: Tensor
    active_RS: Tensor
    full_RS: Tensor
    candidates_RC: Tensor
    num_stored_R: Tensor
    num_committed_R: Tensor
    first_only_R: Tensor
    editable_RC: Tensor
    checks_R: Tensor
    fixed_R: Tensor


def replaced(plan: StepPlan, **fields: Tensor) -> StepPlan:
    """Return the plan with other values in some fields, in a form that torch compiles."""
    pairs = zip(StepPlan._fields, plan, strict=True)
    return StepPlan(*[fields.get(name, value) for name, value in pairs])


class Proposal(NamedTuple):
    """Describe the model's proposal for each canvas position.

    token_RC      int64
    confidence_RC float32, probability of the token after temperature and filters
    score_RC      float32, what positions are ranked by; larger is more certain
    """

    token_RC: Tensor
    confidence_RC: Tensor
    score_RC: Tensor


class StepOutcome(NamedTuple):
    """Describe the decisions that need the forward's proposals.

    unmask_RC       bool, positions that take their proposed token, edits included
    num_committed_R int32, leading positions that are final and emitted; the canvas moves after
    refresh_R       bool, the next span is a refresh: it starts before the canvas
    ended_R         bool, what is emitted ends the request
    """

    unmask_RC: Tensor
    num_committed_R: Tensor
    refresh_R: Tensor
    ended_R: Tensor


PlanFunction = Callable[[Canvas, int], StepPlan]
CommitFunction = Callable[[Canvas, StepPlan, Tensor, Tensor, Tensor], StepOutcome]
AcceptFunction = Callable[
    [Canvas, StepPlan, Tensor, Proposal, int], tuple[Canvas, StepPlan, Tensor]
]


def canvas_segments(
    num_computed_R: np.ndarray, length_R: np.ndarray, max_blocks: int
) -> np.ndarray:
    """Return the stops of a block-causal canvas's query segments: int ``[R, max_blocks + 1]``.

    Segment i is ``[stop[i - 1], stop[i])`` relative to the canvas start and sees every key up to
    its own stop. What lies after `max_blocks` blocks contains no open block and is the last
    segment; segments may be empty.
    """
    stops = np.arange(1, max_blocks + 2) * length_R[:, None]
    stops[:, -1] = num_computed_R
    return np.minimum(stops, num_computed_R[:, None])


def prefill_segments(
    origin_R: np.ndarray, end_R: np.ndarray, length_R: np.ndarray
) -> np.ndarray:
    """Return the stops of the query segments of a prefill ``[0, end)``: int ``[R, K + 1]``.

    What lies before the origin of the block grid, which is the prompt or nothing, is one
    bidirectional block; the rest follows block by block, so that the KV of a resumed request is
    what it was before preemption.
    """
    most = int((np.maximum(end_R - origin_R, 0) // length_R).max(initial=0)) + 1
    stops = origin_R[:, None] + np.arange(most + 1) * length_R[:, None]
    return np.minimum(stops, end_R[:, None])
