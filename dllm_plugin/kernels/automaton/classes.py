"""Read the ids of a class of each logits row: the Triton kernels of rows.

They go through the ids in the order of their classes, a program for each row and class. Shape
letters as in :mod:`dllm_plugin.kernels.automaton.reference`.
"""

# mypy: disable-error-code="no-untyped-def"

from vllm.triton_utils import tl, triton

from dllm_plugin.kernels.confidence.scan import _noise_bits, mixed_state


@triton.jit
def noisy(x, state, counter):
    """Add Gumbel noise in float64."""
    uniform = (_noise_bits(state, counter).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return x.to(tl.float64) - tl.log(-tl.log(uniform))


@triton.jit
def _logits(row_ptr, bias_ptr, token, inside, mask_id, temperature):
    """Load logits in float32, finite, biased and divided; the mask token is banned."""
    x = tl.load(row_ptr + token, mask=inside, other=-1e30).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + token, mask=inside, other=0.0)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -1e30), 1e30), 1e30)
    x = tl.where(token == mask_id, -1e30, x)
    x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    return tl.where(inside, x, float("-inf"))


@triton.jit(
    do_not_specialize=["order_stride", "bound_stride", "mask_id"],
    do_not_specialize_on_alignment=["top_ptr", "mass_ptr"],
)
def score_classes(
    logits_ptr,
    logits_stride,
    source_ptr,
    which_ptr,
    slot_ptr,
    temperature_ptr,
    bias_ptr,
    bias_stride,
    bias_row_ptr,
    order_ptr,
    order_stride,
    bound_ptr,
    bound_stride,
    mask_id,
    top_ptr,
    mass_ptr,
    TILE: tl.constexpr,
):
    """Write the largest logit of a class in a row, and the logarithm of the sum over its ids."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    which = tl.load(which_ptr + row)
    row_ptr = logits_ptr + tl.load(source_ptr + row) * logits_stride
    temperature = tl.load(temperature_ptr + row)
    if bias_ptr is not None:
        bias_ptr += tl.load(bias_row_ptr + tl.load(slot_ptr + row)) * bias_stride
    bounds = bound_ptr + which * bound_stride + kind
    first, stop = tl.load(bounds), tl.load(bounds + 1)
    top = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.full([TILE], 0.0, tl.float32)
    for begin in range(first, stop, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < stop
        token = tl.load(order_ptr + which * order_stride + place, mask=inside, other=0)
        x = _logits(row_ptr, bias_ptr, token, inside, mask_id, temperature)
        higher = tl.maximum(top, x)
        mass = tl.where(top == higher, mass, mass * tl.exp(top - higher))
        mass += tl.where(inside, tl.exp(x - higher), 0.0)
        top = higher
    best = tl.max(top, 0)
    share = tl.where(top == float("-inf"), 0.0, mass * tl.exp(top - best))
    total = tl.where(best == float("-inf"), best, tl.log(tl.sum(share, 0)) + best)
    cell = row * (bound_stride - 1) + kind
    tl.store(top_ptr + cell, best)
    tl.store(mass_ptr + cell, total)


@triton.jit(do_not_specialize=["order_stride", "bound_stride", "mask_id"])
def choose(
    logits_ptr,
    logits_stride,
    source_ptr,
    which_ptr,
    slot_ptr,
    temperature_ptr,
    bias_ptr,
    bias_stride,
    bias_row_ptr,
    order_ptr,
    order_stride,
    bound_ptr,
    bound_stride,
    mask_id,
    seed_ptr,
    position_ptr,
    step_ptr,
    class_ptr,
    token_ptr,
    TILE: tl.constexpr,
):
    """Write the best id of a class in a row, or a sampled one; 0 if there is no class."""
    row = tl.program_id(0).to(tl.int64)
    which = tl.load(which_ptr + row)
    kind = tl.load(class_ptr + row)
    row_ptr = logits_ptr + tl.load(source_ptr + row) * logits_stride
    temperature = tl.load(temperature_ptr + row)
    if bias_ptr is not None:
        bias_ptr += tl.load(bias_row_ptr + tl.load(slot_ptr + row)) * bias_stride
    seed = tl.load(seed_ptr + row)
    step = tl.load(step_ptr + row)
    noise = mixed_state(seed, tl.load(position_ptr + row), step)
    bounds = bound_ptr + which * bound_stride + tl.maximum(kind, 0)
    first, stop = tl.load(bounds), tl.load(bounds + 1)
    stop = tl.where(kind >= 0, stop, first)
    best = tl.full((), float("-inf"), tl.float64)
    chosen = tl.full((), 0, tl.int32)
    for begin in range(first, stop, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < stop
        token = tl.load(order_ptr + which * order_stride + place, mask=inside, other=0)
        x = _logits(row_ptr, bias_ptr, token, inside, mask_id, temperature)
        score = tl.where(temperature > 0, noisy(x, noise, token), x.to(tl.float64))
        top = tl.max(score, 0)
        winner = tl.min(tl.where((score == top) & inside, token, 0x7FFFFFFF), 0)
        chosen = tl.where(top > best, winner, chosen)
        best = tl.maximum(best, top)
    tl.store(token_ptr + row, chosen.to(tl.int64))
