"""Copy logits rows into rows kept per slot: a Triton kernel, and its plain-torch reference.

Only the device knows which rows move: plain torch reads and writes all of them, the kernel
only those that move.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from .launch import launch

TILE = 8192


@triton.jit(do_not_specialize_on_alignment=["from_row_ptr", "slot_ptr", "moved_ptr"])
def _move(
    from_ptr,
    from_stride,
    from_row_ptr,
    to_ptr,
    to_stride,
    slot_ptr,
    moved_ptr,
    vocab_size,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    if tl.load(moved_ptr + request):
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < vocab_size
        row = tl.load(from_row_ptr + request).to(tl.int64)
        slot = tl.load(slot_ptr + request).to(tl.int64)
        x = tl.load(from_ptr + row * from_stride + column, mask=inside)
        tl.store(to_ptr + slot * to_stride + column, x, mask=inside)


def move_rows(
    from_TV: Tensor, from_R: Tensor, to_NV: Tensor, slots_R: Tensor, moved_R: Tensor
) -> None:
    """Copy as the reference does; the last axis of both tables must be dense.

    It reads and writes V values for each request that moved, and nothing for the others.
    """
    vocab_size = to_NV.shape[1]
    launch(
        _move,
        (len(slots_R), triton.cdiv(vocab_size, TILE)),
        from_TV,
        from_TV.stride(0),
        from_R,
        to_NV,
        to_NV.stride(0),
        slots_R,
        moved_R,
        vocab_size,
        TILE=TILE,
        num_warps=8,
    )


def move_rows_reference(
    from_TV: Tensor, from_R: Tensor, to_NV: Tensor, slots_R: Tensor, moved_R: Tensor
) -> None:
    """Copy row `from_R` of `from_TV` to row `slots_R` of `to_NV` if `moved_R` is true."""
    new_RV = from_TV[from_R].to(to_NV.dtype)
    old_RV = to_NV[slots_R]
    to_NV[slots_R] = torch.where(moved_R[:, None], new_RV, old_RV)
