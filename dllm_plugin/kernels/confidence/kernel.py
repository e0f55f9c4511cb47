"""Propose a token and its confidence from each logits row: the Triton kernels.

The logits are read once, in their own type; nothing of their size is written.

There are two kernels. :func:`dllm_plugin.kernels.confidence.scan.scan` cuts each row into ranges of
columns, so that few rows fill a GPU too, and writes a partial for each; `_merge` merges the
partials of a row. Between the two, ranks that have columns of the same rows can exchange their
partials, which :mod:`dllm_plugin.kernels.confidence.partial_reference` defines.

Agreement with the reference: greedy tokens are equal, ties and NaN included; sampled tokens are
equal unless two float64 scores differ by less than the last bit of a logarithm. Confidence and
margin are float32 sums in another order; entropy is ``sum p ln p``, which lies above or at
``sum p ln(p + 1e-10)`` minus ``V * 1e-10`` (1.6e-5 for 152,064 tokens).

Shape letters as in :mod:`dllm_plugin.decoding.plan`; X rows of the logits, S shards of the
vocabulary, K numbers of a partial, P partials of a row.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from dllm_plugin.kernels.launch import launch

from .reference import Columns, Reading, RowStats
from .scan import scan

TILE = 1024  # tokens per round: 16 bytes a thread in bf16
NUM_WARPS = 4
MAX_PARTIALS = 128
# Programs that keep 132 multiprocessors reading: about 16 blocks of 128 threads each, twice.
PROGRAMS = 4096


# Numbers that change from step to step: specialised, each would be compiled anew.
@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _merge(
    partial_ptr,
    out_token_ptr,
    confidence_ptr,
    broken_ptr,
    entropy_ptr,
    margin_ptr,
    num_rows,
    num_partials,
    num_shards,
    RANKING: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Merge the partials of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    if row >= num_rows:
        # Rows without logits: positions for which nothing is proposed read them.
        tl.store(out_token_ptr + row, 0)
        tl.store(confidence_ptr + row, 0.0)
        tl.store(broken_ptr + row, 0)
        if RANKING:
            tl.store(entropy_ptr + row, 0.0)
            tl.store(margin_ptr + row, 0.0)
    else:
        # Lanes without a partial get -1e38: finite, and below any -1e30 over a temperature.
        lane = tl.arange(0, PARTIALS)
        used = lane < num_partials * num_shards
        partial_stride = num_rows * num_partials
        shard = (lane // num_partials).to(tl.int64)
        numbers = 7 if RANKING else 5
        own_ptr = (
            partial_ptr
            + shard * numbers * partial_stride
            + row * num_partials
            + lane % num_partials
        )
        best = tl.load(own_ptr, mask=used, other=float("-inf"))
        tokens = tl.load(own_ptr + partial_stride, mask=used, other=2147483647.0).to(
            tl.int32
        )
        broken = tl.min(tl.where(best != best, tokens, 0x7FFFFFFF), 0)
        clean = tl.where(best == best, best, float("-inf"))
        token = tl.min(
            tl.where((clean == tl.max(clean, 0)) & used, tokens, 0x7FFFFFFF), 0
        )
        token = tl.where(broken < 0x7FFFFFFF, broken, token)
        xs = tl.load(own_ptr + 2 * partial_stride, mask=used, other=float("-inf"))
        x = tl.max(tl.where(tokens == token, xs, float("-inf")), 0)
        no_number = (xs != xs) | (xs == float("inf"))
        top = tl.load(own_ptr + 3 * partial_stride, mask=used, other=-1e38)
        mass = tl.load(own_ptr + 4 * partial_stride, mask=used, other=0.0).to(
            tl.float32
        )
        highest = tl.max(top, 0)
        broken = tl.max(tl.where((tokens == token) & no_number, 1, 0), 0)
        # Lanes begin at -1e30 times a scale: below that nothing of the row was above -inf.
        tl.store(broken_ptr + row, tl.where(highest < -1e20, 1, broken))
        gap = (top - highest).to(tl.float32)
        factor = tl.exp2(gap)
        total = tl.sum(mass * factor, 0)
        tl.store(out_token_ptr + row, token.to(tl.int64))
        tl.store(confidence_ptr + row, tl.exp2((x - highest).to(tl.float32)) / total)
        if RANKING:
            weight = tl.load(own_ptr + 6 * partial_stride, mask=used, other=0.0).to(
                tl.float32
            )
            # In units of log2, as the partials are.
            entropy = tl.sum((weight + gap * mass) * factor, 0) / total - tl.log2(total)
            tl.store(entropy_ptr + row, entropy * 0.6931471805599453)
            second = tl.load(own_ptr + 5 * partial_stride, mask=used, other=-1e38)
            top_lane = tl.min(tl.where(top == highest, lane, PARTIALS), 0)
            others = tl.maximum(second, tl.where(lane == top_lane, -1e38, top))
            margin = (
                1.0 - tl.exp2((tl.max(others, 0) - highest).to(tl.float32))
            ) / total
            tl.store(margin_ptr + row, margin)


def count_partials(
    num_rows: int, width: int, programs: int, shards: int = 1
) -> tuple[int, int]:
    """Return into how many ranges of columns each row is cut, and how many columns each has."""
    tiles = triton.cdiv(width, TILE)
    wanted = min(triton.cdiv(programs, max(num_rows, 1)), tiles, MAX_PARTIALS // shards)
    num_columns = triton.cdiv(tiles, wanted) * TILE
    return triton.cdiv(width, num_columns), num_columns


def propose_rows(rows: Reading, programs: int = PROGRAMS) -> RowStats:
    """Propose as the reference does, in two launches that never wait for the device.

    Args:
        programs: how many partials of all rows are wanted; it changes no token.
    """
    columns = Columns(0, rows.logits_XV.shape[1], 1)
    partials_KTP = scan_rows(rows, columns, programs)
    return merge_rows(partials_KTP[None], rows.want_ranking, rows.num_rows)


def scan_rows(rows: Reading, columns: Columns, programs: int = PROGRAMS) -> Tensor:
    """Compute partials as the reference does, but P of each row: float64 ``[K, T, P]``.

    `rows.divide` and `rows.token_T` are read too, only with all columns of the rows.
    """
    logits_XV = rows.logits_XV
    sampling = rows.sampling
    token_T = rows.token_T
    count, width = len(rows.slot_T), logits_XV.shape[1]
    first, vocab_size, shards = columns
    num_partials, num_columns = count_partials(count, width, programs, shards)
    shape = (7 if rows.want_ranking else 5, count, num_partials)
    partials_KTP = torch.empty(shape, dtype=torch.float64, device=logits_XV.device)
    if not count:
        return partials_KTP
    bias_MV, bias_row_N = rows.bias or (None, None)
    if logits_XV.stride(1) != 1:
        logits_XV = logits_XV.contiguous()
    tables = (None,) * 5 if sampling is None else sampling[:5]
    launch(
        scan,
        (count, num_partials),
        logits_XV,
        logits_XV.stride(0),
        rows.source_T,
        rows.slot_T,
        *tables,
        0 if sampling is None else sampling.shift,
        bias_MV,
        0 if bias_MV is None else bias_MV.stride(0),
        bias_row_N,
        token_T,
        partials_KTP,
        first,
        min(first + width, vocab_size),
        rows.mask_id,
        num_columns,
        SAMPLE=sampling is not None and token_T is None,
        DIVIDE=rows.divide,
        TEMPER=rows.temper and sampling is not None,
        TILE=TILE,
        num_warps=NUM_WARPS,
        RANKING=rows.want_ranking,
    )
    return partials_KTP


def merge_rows(
    partials_SKTP: Tensor, want_ranking: bool = False, num_rows: int | None = None
) -> RowStats:
    """Merge the partials of all shards as the reference does, `MAX_PARTIALS` of a row at most."""
    shards, _, rows, num_partials = partials_SKTP.shape
    total = rows if num_rows is None else num_rows
    device = partials_SKTP.device
    tokens = torch.empty(total, dtype=torch.int64, device=device)
    confidence_T = torch.empty(total, device=device)
    broken_T = torch.empty(total, dtype=torch.int32, device=device)
    ranking = [
        torch.empty(total, device=device) for _ in range(2 if want_ranking else 0)
    ]
    if total:
        launch(
            _merge,
            (total,),
            partials_SKTP,
            tokens,
            confidence_T,
            broken_T,
            *(ranking or (None, None)),
            rows,
            num_partials,
            shards,
            PARTIALS=MAX_PARTIALS,
            num_warps=1,
            RANKING=want_ranking,
        )
    return RowStats(tokens, confidence_T, broken_T, *ranking)
