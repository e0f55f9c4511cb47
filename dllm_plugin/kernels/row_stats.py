"""Triton: one pass over the logits gives token, confidence, entropy and margin of every row.

The twin is :func:`dllm_plugin.kernels.reference.propose_rows`, which says what is computed.
Nothing is written but a few numbers per row, and the logits are read once, in their own type.

Two kernels: :func:`dllm_plugin.kernels.row_scan.scan` cuts each row into parts, so that few rows
fill a GPU too, and `_merge` joins them.

Agreement with the twin: greedy tokens are equal, ties and NaN included; drawn tokens are equal
unless two float64 scores differ by less than the last bit of a logarithm. Confidence and margin
are float32 sums in another order; entropy is ``sum p ln p``, which lies above or at
``sum p ln(p + 1e-10)`` minus ``V * 1e-10`` (1.6e-5 for 152,064 tokens).

Shape letters as in :mod:`dllm_plugin.plan`; X rows of the logits, P parts of a row.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from dllm_plugin.kernels.reference import Draws, RowStats
from dllm_plugin.kernels.row_scan import scan

TILE = 1024  # tokens per round: 16 bytes a thread in bf16
NUM_WARPS = 4
PARTS_AT_MOST = 128
# Programs that keep 132 multiprocessors reading: about 16 blocks of 128 threads each, twice.
PROGRAMS = 4096


# Numbers that change from step to step: specialised, each would be compiled anew.
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _merge(
    logits_ptr,
    row_stride,
    source_ptr,
    slot_ptr,
    temperature_ptr,
    given_ptr,
    bias_ptr,
    bias_row_ptr,
    best_ptr,
    token_ptr,
    part_ptr,
    out_token_ptr,
    confidence_ptr,
    entropy_ptr,
    margin_ptr,
    num_rows,
    num_parts,
    vocab_size,
    mask_id,
    GIVEN: tl.constexpr,
    TEMPER: tl.constexpr,
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
        slot = tl.load(slot_ptr + row).to(tl.int64)
        scale = 1.4426950408889634
        if TEMPER:
            temperature = tl.load(temperature_ptr + slot)
            scale = scale / tl.where(temperature > 0, temperature, 1.0)
        part_stride = num_rows * num_parts
        lane = tl.arange(0, PARTS)
        used = lane < num_parts
        part = row * num_parts + lane
        top = tl.load(part_ptr + part, mask=used, other=-1e30)
        highest = tl.max(top, 0)
        factor = tl.exp2((top - highest) * scale)
        mass = tl.load(part_ptr + part_stride + part, mask=used, other=0.0)
        total = tl.sum(mass * factor, 0)
        if GIVEN:
            token = tl.load(given_ptr + row)
        else:
            best = tl.load(best_ptr + part, mask=used, other=float("-inf"))
            tokens = tl.load(token_ptr + part, mask=used, other=vocab_size)
            broken = tl.min(tl.where(best != best, tokens, vocab_size), 0)
            clean = tl.where(best == best, best, float("-inf"))
            token = tl.min(tl.where((clean == tl.max(clean, 0)) & used, tokens, vocab_size), 0)
            token = tl.where(broken < vocab_size, broken, token)
        source = row if source_ptr is None else tl.load(source_ptr + row).to(tl.int64)
        x = tl.load(logits_ptr + source * row_stride + token).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + tl.load(bias_row_ptr + slot) * vocab_size + token)
        x = tl.where(token == mask_id, float("-inf"), x)
        tl.store(out_token_ptr + row, token.to(tl.int64))
        tl.store(confidence_ptr + row, tl.exp2((x - highest) * scale) / total)
        if RANK:
            weight = tl.load(part_ptr + 3 * part_stride + part, mask=used, other=0.0)
            shifted = weight + (top - highest) * scale * mass
            # In units of log2 so far.
            entropy = tl.sum(shifted * factor, 0) / total - tl.log2(total)
            tl.store(entropy_ptr + row, entropy * 0.6931471805599453)
            second = tl.load(part_ptr + 2 * part_stride + part, mask=used, other=-1e30)
            leader = tl.min(tl.where(top == highest, lane, PARTS), 0)
            others = tl.maximum(second, tl.where(lane == leader, -1e30, top))
            margin = (1.0 - tl.exp2((tl.max(others, 0) - highest) * scale)) / total
            tl.store(margin_ptr + row, margin)


def count_parts(num_rows: int, vocab_size: int, programs: int) -> tuple[int, int]:
    """Into how many parts each row is cut, and how many tokens a part has."""
    tiles = triton.cdiv(vocab_size, TILE)
    wanted = min(triton.cdiv(programs, max(num_rows, 1)), tiles, PARTS_AT_MOST)
    part_size = triton.cdiv(tiles, wanted) * TILE
    return triton.cdiv(vocab_size, part_size), part_size


def propose_rows(
    logits_XV: Tensor,
    slot_T: Tensor,
    mask_id: int,
    draws: Draws | None = None,
    *,
    divide: bool = True,
    temper: bool = True,
    want_rank: bool = False,
    bias: tuple[Tensor, Tensor] | None = None,
    source_T: Tensor | None = None,
    token_T: Tensor | None = None,
    num_rows: int | None = None,
    programs: int = PROGRAMS,
) -> RowStats:
    """Launch the two kernels; arguments and result as the twin's. Never waits for the device.

    `programs` is how many parts of rows are wanted in all; it changes no token.
    """
    rows, vocab_size, device = len(slot_T), logits_XV.shape[1], logits_XV.device
    total = rows if num_rows is None else num_rows
    num_parts, part_size = count_parts(rows, vocab_size, programs)
    best_dtype = torch.float32 if draws is None else torch.float64
    best_TP = torch.empty(rows, num_parts, dtype=best_dtype, device=device)
    token_TP = torch.empty(rows, num_parts, dtype=torch.int32, device=device)
    # Largest logit and mass; with `want_rank` also the second largest, and the entropy's sum.
    partial = torch.empty(4 if want_rank else 2, rows, num_parts, device=device)
    tokens = torch.empty(total, dtype=torch.int64, device=device)
    out = [torch.empty(total, device=device) for _ in range(3 if want_rank else 1)]
    bias_MV, bias_row_N = (None, None) if bias is None else bias
    if logits_XV.stride(1) != 1:
        logits_XV = logits_XV.contiguous()
    temper = temper and draws is not None
    common = (logits_XV, logits_XV.stride(0), source_T, slot_T)
    parts = (best_TP, token_TP, partial)
    if rows:
        noise = (None,) * 5 if draws is None else draws[:5]
        scan[(rows, num_parts)](
            *common,
            *noise,
            0 if draws is None else draws.shift,
            bias_MV,
            bias_row_N,
            *parts,
            vocab_size,
            mask_id,
            part_size,
            DRAW=draws is not None and token_T is None,
            DIVIDE=divide,
            TEMPER=temper,
            TILE=TILE,
            num_warps=NUM_WARPS,
            RANK=want_rank,
        )
    if total:
        _merge[(total,)](
            *common,
            None if draws is None else draws.temperature_N,
            token_T,
            bias_MV,
            bias_row_N,
            *parts,
            tokens,
            *(out if want_rank else (*out, None, None)),
            rows,
            num_parts,
            vocab_size,
            mask_id,
            GIVEN=token_T is not None,
            TEMPER=temper,
            PARTS=PARTS_AT_MOST,
            num_warps=1,
            RANK=want_rank,
        )
    return RowStats(tokens, *out)
