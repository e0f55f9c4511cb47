"""Scan the logits for partials of each row: the first of the two Triton kernels.

Every lane keeps its own running softmax (maximum, sum, best token); lanes are merged once, when the
program has read its columns. A sampled token is decided in float64, as in the reference. But
float64 logarithms for every token would take ten times as long as reading the logits. So lanes rank
tokens by a float32 approximation of the noise, whose error is bounded, and only the token that a
lane kept is computed in float64. If some lane dropped a token so near the best that the order could
differ, the columns are read again in float64.
"""

# mypy: disable-error-code="no-untyped-def"

from vllm.triton_utils import tl, triton


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mixed_state(seed, position, step):
    """Mix the counters of random numbers but the last counter, as `gumbel_uniform` does."""
    state = _mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    state = _mix64(state ^ (position.to(tl.uint64) * 0x9E3779B97F4A7C15))
    return _mix64(state ^ (step.to(tl.uint64) * 0xBF58476D1CE4E5B9))


@triton.jit
def _noise_state(seed_ptr, counter_ptr, start_ptr, offset_ptr, slot, row, shift):
    """Mix all counters of a row but the token."""
    position = (
        tl.load(start_ptr + slot) + tl.load(offset_ptr + row).to(tl.int64) + shift
    )
    step = tl.load(counter_ptr + slot)
    return mixed_state(tl.load(seed_ptr + slot), position, step)


@triton.jit
def _noise_bits(state, token):
    bits = _mix64(state ^ (token.to(tl.uint64) * 0x94D049BB133111EB)) >> 12
    return bits.to(tl.int64)


@triton.jit
def _quick_gumbel(bits):
    """Approximate ``-ln(-ln u)`` in float32; the error is below 1e-4, also near 0 and 1."""
    rest = 0xFFFFFFFFFFFFF - bits
    is_low = bits <= rest
    near = (tl.where(is_low, bits, rest).to(tl.float32) + 0.5) * 2.220446049250313e-16
    # Near u = 1 the logarithm of 1 - x loses the digits of x: a series instead.
    series = near * (1.0 + near * (0.5 + near * (0.33333333 + near * 0.25)))
    log2_u = tl.log2(tl.where(is_low, near, 1.0 - near))
    minus_ln = tl.where(
        (near < 0.0078125) & (bits > rest), series, log2_u * -0.6931471805599453
    )
    return tl.log2(minus_ln) * -0.6931471805599453


@triton.jit
def _exact_score(x, bits, temperature, DIVIDE: tl.constexpr):
    x = x.to(tl.float32)
    if DIVIDE:
        x = tl.div_rn(x, temperature)
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return x.to(tl.float64) - tl.log(-tl.log(uniform))


@triton.jit
def _load(logits_ptr, bias_ptr, token, end, mask_id):
    """Load logits of a row in float32, biased, the mask token banned; -inf from `end` on."""
    inside = token < end
    x = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + token, mask=inside, other=0.0)
    return tl.where(token == mask_id, float("-inf"), x)


@triton.jit
def _first_nan(
    logits_ptr,
    bias_ptr,
    first,
    stop,
    end,
    mask_id,
    TILE: tl.constexpr,
):
    """Return the first token whose logit is NaN; a number after `end` if none is."""
    earliest = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for begin in range(first, stop, TILE):
        here = begin + tl.arange(0, TILE)
        x = _load(logits_ptr, bias_ptr, here, end, mask_id)
        earliest = tl.where(x != x, tl.minimum(earliest, here), earliest)
    return tl.min(earliest, 0)


@triton.jit
def _read_again(
    logits_ptr,
    bias_ptr,
    state,
    temperature,
    first,
    stop,
    mask_id,
    DIVIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the best token of each lane and its score, decided in float64."""
    best = tl.full([TILE], float("-inf"), tl.float64)
    token = first + tl.arange(0, TILE)
    for begin in range(first, stop, TILE):
        here = begin + tl.arange(0, TILE)
        x = _load(logits_ptr, bias_ptr, here, stop, mask_id)
        score = _exact_score(x, _noise_bits(state, here), temperature, DIVIDE)
        token = tl.where(score > best, here, token)
        best = tl.maximum(best, score)
    return token, best


@triton.jit
def _divisor(temperature_ptr, slot):
    """Return what logits are divided by: 1 at temperature 0."""
    temperature = tl.load(temperature_ptr + slot)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _weigh(weight, mass, factor, gap):
    """Add one x to the sum of ``e ** (x - top) * (x - top)``, in units of log2."""
    moved = factor * (weight - mass * gap)
    added = tl.where(factor > 0, weight + factor * gap, weight)
    return tl.where(gap > 0, moved, added)


# Not compiled anew for numbers and for slices of tensors that differ from step to step.
@triton.jit(
    do_not_specialize=["shift", "mask_id"],
    do_not_specialize_on_alignment=[
        "source_ptr",
        "slot_ptr",
        "offset_ptr",
        "given_ptr",
    ],
)
def scan(
    logits_ptr,
    row_stride,
    source_ptr,
    slot_ptr,
    temperature_ptr,
    seed_ptr,
    counter_ptr,
    start_ptr,
    offset_ptr,
    shift,
    bias_ptr,
    bias_stride,
    bias_row_ptr,
    given_ptr,
    partial_ptr,
    first_column,
    end,
    mask_id,
    num_columns,
    SAMPLE: tl.constexpr,
    DIVIDE: tl.constexpr,
    TEMPER: tl.constexpr,
    RANKING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Reduce one range of columns of one row per program to a partial."""
    row = tl.program_id(0).to(tl.int64)
    partial_ptr += row * tl.num_programs(1) + tl.program_id(1)
    partial_stride = tl.num_programs(0) * tl.num_programs(1)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    source = row if source_ptr is None else tl.load(source_ptr + row).to(tl.int64)
    # Tokens are absolute ids from here on.
    logits_ptr += source * row_stride - first_column
    floor = -1e30
    if bias_ptr is not None:
        bias_ptr += tl.load(bias_row_ptr + slot) * bias_stride
        floor = tl.where(tl.load(bias_row_ptr + slot) > 0, -1e15, -1e30)  # see `lowest`
    scale = 1.4426950408889634  # exp2 instead of exp
    if TEMPER:  # also if tokens are given
        scale = scale / _divisor(temperature_ptr, slot)
    is_sampled = False
    if SAMPLE:
        is_sampled = tl.load(temperature_ptr + slot) > 0
        temperature = _divisor(temperature_ptr, slot)
        inverse = 1.0 / temperature if DIVIDE else 1.0
        state = _noise_state(
            seed_ptr, counter_ptr, start_ptr, offset_ptr, slot, row, shift
        )
    first = first_column + tl.program_id(1) * num_columns
    stop = tl.minimum(first + num_columns, end)
    lane = tl.arange(0, TILE)
    top = tl.full([TILE], -1e30, tl.float32)  # finite: -inf minus -inf is no number
    mass = tl.zeros([TILE], tl.float32)
    token = first + lane
    if RANKING:
        second = tl.full([TILE], -1e30, tl.float32)
        weight = tl.zeros([TILE], tl.float32)
    if SAMPLE:
        best = tl.full([TILE], float("-inf"), tl.float32)
        runner_up = tl.full([TILE], float("-inf"), tl.float32)

    for begin in range(first, stop, TILE):
        here = begin + lane
        x = _load(logits_ptr, bias_ptr, here, end, mask_id)
        above = x > top
        gap = x - top
        factor = tl.exp2(-tl.abs(gap) * scale)
        if RANKING:
            second = tl.maximum(second, tl.minimum(top, x))
            weight = _weigh(weight, mass, factor, gap * scale)
        mass = tl.where(above, mass * factor + 1.0, mass + factor)
        top = tl.where(above, x, top)
        if SAMPLE:
            score = x
            if is_sampled:
                score = x * inverse + _quick_gumbel(_noise_bits(state, here))
            better = score > best
            runner_up = tl.maximum(runner_up, tl.minimum(best, score))
            best = tl.where(better, score, best)
            token = tl.where(better, here, token)
        else:
            token = tl.where(above, here, token)

    highest = tl.max(top, 0)
    factor = tl.exp2((top - highest) * scale)
    total = tl.sum(mass * factor, 0)
    if RANKING:
        shifted = weight + (top - highest) * scale * mass
        tl.store(partial_ptr + 6 * partial_stride, tl.sum(shifted * factor, 0))
        top_lane = tl.min(tl.where(top == highest, lane, TILE), 0)
        others = tl.maximum(second, tl.where(lane == top_lane, floor, top))
        tl.store(
            partial_ptr + 5 * partial_stride, tl.max(others, 0).to(tl.float64) * scale
        )
    if SAMPLE:
        exact = _load(logits_ptr, bias_ptr, token, end, mask_id).to(tl.float64)
        if is_sampled:
            exact = _exact_score(exact, _noise_bits(state, token), temperature, DIVIDE)
            most = tl.max(best, 0)
            dropped = tl.max(runner_up, 0) >= most - 2e-3 - 1e-6 * tl.abs(most)
            if dropped & (most > float("-inf")):
                token, exact = _read_again(
                    logits_ptr,
                    bias_ptr,
                    state,
                    temperature,
                    first,
                    stop,
                    mask_id,
                    DIVIDE,
                    TILE,
                )
        # Nothing, of lanes after the end.
        exact = tl.where(token < end, exact, float("-inf"))
        winner = tl.max(exact, 0)
        chosen = tl.min(tl.where((exact == winner) & (token < end), token, end), 0)
    else:
        winner = highest
        chosen = tl.min(tl.where(top == highest, token, 0x7FFFFFFF), 0)
    if total != total:
        # As torch's argmax: the first NaN wins. Infinities bring no NaN here.
        earliest = _first_nan(logits_ptr, bias_ptr, first, stop, end, mask_id, TILE)
        chosen = tl.where(earliest < end, earliest, chosen)
        winner = tl.where(earliest < end, float("nan"), winner)
    if given_ptr is not None:
        chosen = tl.load(given_ptr + row).to(tl.int32)
        winner = 0.0
    won = _load(logits_ptr, bias_ptr, chosen, end, mask_id)
    tl.store(partial_ptr, winner)
    tl.store(partial_ptr + partial_stride, chosen)
    tl.store(partial_ptr + 2 * partial_stride, won.to(tl.float64) * scale)
    tl.store(
        partial_ptr + 3 * partial_stride,
        tl.maximum(highest, floor).to(tl.float64) * scale,
    )
    tl.store(partial_ptr + 4 * partial_stride, total)
