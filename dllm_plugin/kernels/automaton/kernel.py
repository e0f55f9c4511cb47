"""Find the likeliest text of a token automaton for each canvas: the Triton kernels.

One program reads the ids of one class of one row; one launch per position moves the values of all
states, a program each; one program per canvas walks back. Sums are taken in a fixed order, so a
seed gives the same text again. Agreement with the reference: best texts are equal; drawn texts are,
unless two float64 scores differ by less than float32 sums do that are taken in another order.
Shape letters as in :mod:`dllm_plugin.kernels.automaton.reference`.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from dllm_plugin.kernels.confidence.scan import mixed_state
from dllm_plugin.kernels.launch import launch

from .classes import choose, noisy, score_classes
from .reference import Canvases, Path, Rows, Tables

TILE = 256  # ids of a class per round
EDGES = 64  # edges per round
# Edges or states per round of the program that walks back.
WIDE = 1024
NUM_WARPS = 4


@triton.jit
def _edge_totals(
    value_ptr, score_ptr, source_ptr, class_ptr, place, inside, given, END: tl.constexpr
):
    """Return the values of some edges at a position; `given` is not OUTSIDE."""
    source = tl.load(source_ptr + place, mask=inside, other=0)
    kind = tl.load(class_ptr + place, mask=inside, other=0)
    gain = tl.load(score_ptr + kind, mask=inside, other=0.0)
    gain = tl.where((source == END) | (given >= 0), 0.0, gain)
    taken = inside & (kind != 0) & ((given < 0) | (kind == given))
    value = tl.load(value_ptr + source, mask=inside, other=float("-inf"))
    return tl.where(taken, value + gain, float("-inf"))


@triton.jit(
    do_not_specialize=["place", "length", "num_states", "num_classes", "num_edges"]
)
def _advance(
    value_ptr,
    score_ptr,
    which_ptr,
    given_ptr,
    temperature_ptr,
    source_ptr,
    class_ptr,
    first_ptr,
    place,
    length,
    num_states,
    num_classes,
    num_edges,
    END: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Write the value of one state after a position."""
    canvas = tl.program_id(0).to(tl.int64)
    state = tl.program_id(1)
    which = tl.load(which_ptr + canvas)
    given = tl.load(given_ptr + canvas * length + place)
    before_ptr = value_ptr + (canvas * (length + 1) + place) * num_states
    if given == -2:
        result = tl.load(before_ptr + state)
    else:
        bounds = first_ptr + which * (num_states + 1) + state
        first, stop = tl.load(bounds), tl.load(bounds + 1)
        best = tl.full([EDGES], float("-inf"), tl.float32)
        mass = tl.full([EDGES], 0.0, tl.float32)
        for begin in range(first, stop, EDGES):
            edge = begin + tl.arange(0, EDGES)
            total = _edge_totals(
                before_ptr,
                score_ptr + (canvas * length + place) * num_classes,
                source_ptr + which * num_edges,
                class_ptr + which * num_edges,
                edge,
                edge < stop,
                given,
                END,
            )
            higher = tl.maximum(best, total)
            mass = tl.where(best == higher, mass, mass * tl.exp(best - higher))
            mass += tl.where(total == float("-inf"), 0.0, tl.exp(total - higher))
            best = higher
        result = tl.max(best, 0)
        if (tl.load(temperature_ptr + canvas) > 0) & (result > float("-inf")):
            share = tl.where(best == float("-inf"), 0.0, mass * tl.exp(best - result))
            result += tl.log(tl.sum(share, 0))
    tl.store(before_ptr + num_states + state, result)


@triton.jit(do_not_specialize=["length", "num_states", "num_classes", "num_edges"])
def _walk_back(
    value_ptr,
    score_ptr,
    which_ptr,
    given_ptr,
    room_ptr,
    temperature_ptr,
    seed_ptr,
    step_ptr,
    position_ptr,
    source_ptr,
    class_ptr,
    first_ptr,
    far_ptr,
    path_ptr,
    state_ptr,
    length,
    num_states,
    num_classes,
    num_edges,
    END: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the text of a canvas from its end on."""
    canvas = tl.program_id(0).to(tl.int64)
    which = tl.load(which_ptr + canvas)
    room = tl.load(room_ptr + canvas)
    samples = tl.load(temperature_ptr + canvas) > 0
    seed = tl.load(seed_ptr + canvas)
    step = tl.load(step_ptr + canvas)
    position = tl.load(position_ptr + canvas)
    value_ptr += canvas * (length + 1) * num_states
    noise = mixed_state(seed ^ 0x1A57, position, step)
    best = tl.full((), float("-inf"), tl.float64)
    state = tl.full((), 0, tl.int32)
    for begin in range(0, num_states, WIDE):
        here = begin + tl.arange(0, WIDE)
        inside = here < num_states
        value = tl.load(
            value_ptr + length * num_states + here, mask=inside, other=float("-inf")
        )
        far = tl.load(far_ptr + which * num_states + here, mask=inside, other=0)
        value = tl.where(far.to(tl.int64) <= room, value, float("-inf"))
        score = tl.where(samples, noisy(value, noise, here), value.to(tl.float64))
        top = tl.max(score, 0)
        first = tl.min(tl.where((score == top) & inside, here, 0x7FFFFFFF), 0)
        state = tl.where(top > best, first, state)
        best = tl.maximum(best, top)
    tl.store(state_ptr + canvas * (length + 1) + length, state.to(tl.int64))
    for back in range(length):
        place = length - 1 - back
        given = tl.load(given_ptr + canvas * length + place)
        kind = tl.full((), -2, tl.int32)
        if given != -2:
            noise = mixed_state(seed ^ 0xED6E, position + place, step)
            bounds = first_ptr + which * (num_states + 1) + state
            low, high = tl.load(bounds), tl.load(bounds + 1)
            best = tl.full((), float("-inf"), tl.float64)
            chosen = tl.minimum(low, num_edges - 1)
            for begin in range(low, high, WIDE):
                edge = begin + tl.arange(0, WIDE)
                total = _edge_totals(
                    value_ptr + place * num_states,
                    score_ptr + (canvas * length + place) * num_classes,
                    source_ptr + which * num_edges,
                    class_ptr + which * num_edges,
                    edge,
                    edge < high,
                    given,
                    END,
                )
                score = tl.where(
                    samples, noisy(total, noise, edge), total.to(tl.float64)
                )
                top = tl.max(score, 0)
                first = tl.min(
                    tl.where((score == top) & (edge < high), edge, 0x7FFFFFFF), 0
                )
                chosen = tl.where(top > best, first, chosen)
                best = tl.maximum(best, top)
            kind = tl.load(class_ptr + which * num_edges + chosen)
            state = tl.load(source_ptr + which * num_edges + chosen)
        tl.store(path_ptr + canvas * length + place, kind.to(tl.int64))
        tl.store(state_ptr + canvas * (length + 1) + place, state.to(tl.int64))


def _arguments(tables: Tables, rows: Rows) -> tuple[Any, ...]:
    """Return the arguments with which both kernels of rows begin."""
    bias: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)
    if rows.bias is not None:
        bias = (rows.bias[0], rows.bias[0].stride(0), rows.bias[1])
    return (
        rows.logits_XV,
        rows.logits_XV.stride(0),
        rows.source_T,
        rows.which_T,
        rows.slot_T,
        rows.temperature_T,
        *bias,
        tables.order_AV,
        tables.order_AV.stride(0),
        tables.bound_AK,
        tables.bound_AK.stride(0),
        rows.mask_id,
    )


def score_rows(tables: Tables, rows: Rows) -> Tensor:
    """Score classes as the reference does."""
    count = len(rows.source_T)
    num_classes = tables.bound_AK.shape[1] - 1
    top_TK, mass_TK = torch.empty(2, count, num_classes, device=rows.source_T.device)
    if not count:
        return top_TK
    grid = (count, num_classes)
    arguments = _arguments(tables, rows)
    launch(
        score_classes, grid, *arguments, top_TK, mass_TK, TILE=TILE, num_warps=NUM_WARPS
    )
    score_TK = torch.where(rows.temperature_T[:, None] > 0, mass_TK, top_TK)
    return (score_TK - mass_TK.logsumexp(dim=1, keepdim=True)).clamp_min(-1e30)


def choose_ids(tables: Tables, rows: Rows, class_T: Tensor) -> Tensor:
    """Choose ids as the reference does; 0 in rows without a class."""
    token_T = torch.empty_like(rows.source_T)
    if len(token_T):
        launch(
            choose,
            (len(token_T),),
            *_arguments(tables, rows),
            rows.seed_T,
            rows.position_T,
            rows.step_T,
            class_T,
            token_T,
            TILE=WIDE,
            num_warps=NUM_WARPS,
        )
    return token_T


def forward(tables: Tables, canvases: Canvases, score_GCK: Tensor) -> Tensor:
    """Value states as the reference does; a launch for each position."""
    count, length, num_classes = score_GCK.shape
    num_states = tables.far_AQ.shape[1]
    num_edges = tables.source_AE.shape[1]
    value_GCQ = score_GCK.new_empty(count, length + 1, num_states)
    value_GCQ[:, 0] = float("-inf")
    value_GCQ[:, 0].scatter_(1, canvases.state_G[:, None], 0.0)
    for place in range(length):
        launch(
            _advance,
            (count, num_states),
            value_GCQ,
            score_GCK,
            canvases.which_G,
            canvases.given_GC,
            canvases.temperature_G,
            tables.source_AE,
            tables.class_AE,
            tables.first_AQ,
            place,
            length,
            num_states,
            num_classes,
            num_edges,
            END=0,
            EDGES=EDGES,
            num_warps=1,
        )
    return value_GCQ


def backtrack(
    tables: Tables, canvases: Canvases, score_GCK: Tensor, value_GCQ: Tensor
) -> Path:
    """Walk back as the reference does."""
    count, length, num_classes = score_GCK.shape
    class_GC = torch.empty_like(canvases.given_GC)
    state_GC1 = class_GC.new_empty(count, length + 1)
    launch(
        _walk_back,
        (count,),
        value_GCQ,
        score_GCK,
        canvases.which_G,
        canvases.given_GC,
        canvases.room_G,
        canvases.temperature_G,
        canvases.seed_G,
        canvases.step_G,
        canvases.position_G,
        tables.source_AE,
        tables.class_AE,
        tables.first_AQ,
        tables.far_AQ,
        class_GC,
        state_GC1,
        length,
        tables.far_AQ.shape[1],
        num_classes,
        tables.source_AE.shape[1],
        END=0,
        WIDE=WIDE,
        num_warps=NUM_WARPS,
    )
    return Path(class_GC, state_GC1)
