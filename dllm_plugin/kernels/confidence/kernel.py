"""Triton: one pass over the logits gives token, confidence, entropy and margin of every row.

The reference implementation is :func:`dllm_plugin.kernels.confidence.reference.propose_rows`.
Nothing is written but a few numbers per row, and the logits are read once, in their own type.

Two kernels: :func:`dllm_plugin.kernels.confidence.scan.scan` cuts each row into parts, so that
few rows fill a GPU too, and `_merge` joins them. Between them ranks that hold columns of the same
rows can exchange what they found: see :mod:`dllm_plugin.kernels.confidence.partial_reference`.

Agreement with the twin: greedy tokens are equal, ties and NaN included; drawn tokens are equal
unless two float64 scores differ by less than the last bit of a logarithm. Confidence and margin
are float32 sums in another order; entropy is ``sum p ln p``, which lies above or at
``sum p ln(p + 1e-10)`` minus ``V * 1e-10`` (1.6e-5 for 152,064 tokens).

Shape letters as in :mod:`dllm_plugin.decoding.plan`; X rows of the logits, S shards of the
vocabulary, K numbers of a part, P parts of a row.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from dllm_plugin.kernels.confidence.reference import Columns, Draws, RowStats
from dllm_plugin.kernels.confidence.scan import scan

TILE = 1024  # tokens per round: 16 bytes a thread in bf16
NUM_WARPS = 4
PARTS_AT_MOST = 128
# Programs that keep 132 multiprocessors reading: about 16 blocks of 128 threads each, twice.
PROGRAMS = 4096


# Numbers that change from step to step: specialised, each would be compiled anew.
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _merge(
    part_ptr,
    out_token_ptr,
    confidence_ptr,
    entropy_ptr,
    margin_ptr,
    num_rows,
    num_parts,
    num_shards,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= num_rows:
        # Rows that no logits stand behind: positions that are not proposed for read them.
        tl.store(out_token_ptr + row, 0)
        tl.store(confidence_ptr + row, 0.0)
        if RANK:
            tl.store(entropy_ptr + row, 0.0)
            tl.store(margin_ptr + row, 0.0)
    else:
        # Lanes without a part lie below -1e30 over the temperature, and are finite, too.
        lane = tl.arange(0, PARTS)
        used = lane < num_parts * num_shards
        part_stride = num_rows * num_parts
        shard = (lane // num_parts).to(tl.int64)
        numbers = 7 if RANK else 5
        own_ptr = part_ptr + shard * numbers * part_stride + row * num_parts + lane % num_parts
        best = tl.load(own_ptr, mask=used, other=float("-inf"))
        tokens = tl.load(own_ptr + part_stride, mask=used, other=2147483647.0).to(tl.int32)
        broken = tl.min(tl.where(best != best, tokens, 0x7FFFFFFF), 0)
        clean = tl.where(best == best, best, float("-inf"))
        token = tl.min(tl.where((clean == tl.max(clean, 0)) & used, tokens, 0x7FFFFFFF), 0)
        token = tl.where(broken < 0x7FFFFFFF, broken, token)
        xs = tl.load(own_ptr + 2 * part_stride, mask=used, other=float("-inf"))
        x = tl.max(tl.where(tokens == token, xs, float("-inf")), 0)
        top = tl.load(own_ptr + 3 * part_stride, mask=used, other=-1e38)
        mass = tl.load(own_ptr + 4 * part_stride, mask=used, other=0.0).to(tl.float32)
        highest = tl.max(top, 0)
        gap = (top - highest).to(tl.float32)
        factor = tl.exp2(gap)
        total = tl.sum(mass * factor, 0)
        tl.store(out_token_ptr + row, token.to(tl.int64))
        tl.store(confidence_ptr + row, tl.exp2((x - highest).to(tl.float32)) / total)
        if RANK:
            weight = tl.load(own_ptr + 6 * part_stride, mask=used, other=0.0).to(tl.float32)
            # In units of log2 so far.
            entropy = tl.sum((weight + gap * mass) * factor, 0) / total - tl.log2(total)
            tl.store(entropy_ptr + row, entropy * 0.6931471805599453)
            second = tl.load(own_ptr + 5 * part_stride, mask=used, other=-1e38)
            leader = tl.min(tl.where(top == highest, lane, PARTS), 0)
            others = tl.maximum(second, tl.where(lane == leader, -1e38, top))
            margin = (1.0 - tl.exp2((tl.max(others, 0) - highest).to(tl.float32))) / total
            tl.store(margin_ptr + row, margin)


def count_parts(num_rows: int, width: int, programs: int, shards: int = 1) -> tuple[int, int]:
    """Into how many parts each row is cut, and how many tokens a part has."""
    tiles = triton.cdiv(width, TILE)
    wanted = min(triton.cdiv(programs, max(num_rows, 1)), tiles, PARTS_AT_MOST // shards)
    part_size = triton.cdiv(tiles, wanted) * TILE
    return triton.cdiv(width, part_size), part_size


def propose_rows(
    logits_XV: Tensor,
    slot_T: Tensor,
    mask_id: int,
    draws: Draws | None = None,
    *,
    want_rank: bool = False,
    num_rows: int | None = None,
    **options: Any,
) -> RowStats:
    """Launch the two kernels; arguments as the twin's and :func:`scan_rows`'s.

    Never waits for the device.
    """
    parts_KTP = scan_rows(logits_XV, slot_T, mask_id, draws, want_rank=want_rank, **options)
    return merge_rows(parts_KTP[None], want_rank, num_rows)


def scan_rows(
    logits_XV: Tensor,
    slot_T: Tensor,
    mask_id: int,
    draws: Draws | None = None,
    *,
    columns: Columns | None = None,
    divide: bool = True,
    temper: bool = True,
    want_rank: bool = False,
    bias: tuple[Tensor, Tensor] | None = None,
    source_T: Tensor | None = None,
    token_T: Tensor | None = None,
    programs: int = PROGRAMS,
) -> Tensor:
    """What the parts of each row say, float64 ``[K, T, P]``; arguments as `propose_rows` has them.

    Args:
        columns: which columns of the rows these are; None for all of them.
        token_T: as there; only where all columns are here.
        programs: how many parts of rows are wanted in all; it changes no token.
    """
    rows, width, device = len(slot_T), logits_XV.shape[1], logits_XV.device
    first, vocab_size, shards = columns or Columns(0, width, 1)
    num_parts, part_size = count_parts(rows, width, programs, shards)
    parts_KTP = torch.empty(
        7 if want_rank else 5, rows, num_parts, dtype=torch.float64, device=device
    )
    if not rows:
        return parts_KTP
    bias_MV, bias_row_N = (None, None) if bias is None else bias
    if logits_XV.stride(1) != 1:
        logits_XV = logits_XV.contiguous()
    noise = (None,) * 5 if draws is None else draws[:5]
    scan[(rows, num_parts)](
        logits_XV,
        logits_XV.stride(0),
        source_T,
        slot_T,
        *noise,
        0 if draws is None else draws.shift,
        bias_MV,
        0 if bias_MV is None else bias_MV.stride(0),
        bias_row_N,
        token_T,
        parts_KTP,
        first,
        min(first + width, vocab_size),
        mask_id,
        part_size,
        DRAW=draws is not None and token_T is None,
        DIVIDE=divide,
        TEMPER=temper and draws is not None,
        TILE=TILE,
        num_warps=NUM_WARPS,
        RANK=want_rank,
    )
    return parts_KTP


def merge_rows(
    parts_SKTP: Tensor, want_rank: bool = False, num_rows: int | None = None
) -> RowStats:
    """Join what all shards found, at most `PARTS_AT_MOST` parts; as the twin's."""
    shards, _, rows, num_parts = parts_SKTP.shape
    total, device = rows if num_rows is None else num_rows, parts_SKTP.device
    tokens = torch.empty(total, dtype=torch.int64, device=device)
    out = [torch.empty(total, device=device) for _ in range(3 if want_rank else 1)]
    if total:
        _merge[(total,)](
            parts_SKTP,
            tokens,
            *(out if want_rank else (*out, None, None)),
            rows,
            num_parts,
            shards,
            PARTS=PARTS_AT_MOST,
            num_warps=1,
            RANK=want_rank,
        )
    return RowStats(tokens, *out)
