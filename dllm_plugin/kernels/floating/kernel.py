"""Split canvases into run, window and rest: the Triton kernel.

A launch before the forward, since the host does not know where a run ends.
"""

# mypy: disable-error-code="no-untyped-def"

from torch import Tensor
from vllm.triton_utils import tl, triton

from dllm_plugin.kernels.floating.reference import Rules, Texts


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
