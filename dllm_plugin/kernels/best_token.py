"""Find the best token of some logits rows but for three: a Triton kernel, and its reference.

Only the device knows which rows are wanted: the kernel reads these and no others.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from .launch import launch

TILE = 8192
NO_TOKEN = 0x7FFFFFFF


INDEX_PTRS = ["row_ptr", "wanted_ptr", "banned_ptr", "bias_row_ptr"]


@triton.jit(do_not_specialize_on_alignment=INDEX_PTRS)
def _find_best(
    x_ptr,
    x_stride,
    row_ptr,
    wanted_ptr,
    banned_ptr,
    bias_ptr,
    bias_row_ptr,
    out_ptr,
    vocab_size,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    place = tl.program_id(0)
    token = tl.full((), 0, tl.int32)
    if tl.load(wanted_ptr + place):
        row = tl.load(row_ptr + place).to(tl.int64)
        first = tl.load(banned_ptr + 3 * place)
        second = tl.load(banned_ptr + 3 * place + 1)
        third = tl.load(banned_ptr + 3 * place + 2)
        best = tl.full((), float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            column = start + tl.arange(0, TILE)
            inside = (column < vocab_size) & (column != first)
            inside = inside & (column != second) & (column != third)
            x = tl.load(
                x_ptr + row * x_stride + column, mask=inside, other=float("-inf")
            ).to(tl.float32)
            if HAS_BIAS:
                bias_row = tl.load(bias_row_ptr + place).to(tl.int64)
                bias = bias_ptr + bias_row * vocab_size + column
                x += tl.load(bias, mask=inside, other=0.0)
            highest = tl.max(x, 0)
            lowest = tl.min(tl.where(x == highest, column, NO_TOKEN), 0)
            token = tl.where(highest > best, lowest, token)
            best = tl.maximum(highest, best)
    tl.store(out_ptr + place, token.to(tl.int64))


def best_token(
    logits_XV: Tensor,
    row_N: Tensor,
    wanted_N: Tensor,
    banned_N3: Tensor,
    bias_MV: Tensor | None,
    bias_row_N: Tensor,
) -> Tensor:
    """Find as the reference does, without waiting for the device."""
    vocab_size = logits_XV.shape[1]
    out_N = torch.empty(len(row_N), dtype=torch.int64, device=logits_XV.device)
    launch(
        _find_best,
        (len(row_N),),
        logits_XV,
        logits_XV.stride(0),
        row_N,
        wanted_N,
        banned_N3,
        logits_XV if bias_MV is None else bias_MV,
        bias_row_N,
        out_N,
        vocab_size,
        HAS_BIAS=bias_MV is not None,
        TILE=TILE,
        NO_TOKEN=NO_TOKEN,
        num_warps=8,
    )
    return out_N


def best_token_reference(
    logits_XV: Tensor,
    row_N: Tensor,
    wanted_N: Tensor,
    banned_N3: Tensor,
    bias_MV: Tensor | None,
    bias_row_N: Tensor,
) -> Tensor:
    """Return the best token of rows `row_N` but for theirs of `banned_N3`: int64 ``[N]``.

    To each row its row of `bias_MV` is added, if there are biases. Rows that are not wanted
    have 0. The last axis of the logits must be dense.
    """
    out_N = torch.zeros_like(row_N, dtype=torch.int64)
    if not wanted_N.any():
        return out_N
    rows_MV = logits_XV[row_N[wanted_N]]
    if bias_MV is not None:
        rows_MV = rows_MV.to(torch.float32) + bias_MV[bias_row_N[wanted_N]]
    rows_MV.scatter_(1, banned_N3[wanted_N], float("-inf"))
    out_N[wanted_N] = rows_MV.argmax(dim=1)
    return out_N
