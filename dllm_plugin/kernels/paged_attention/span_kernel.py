"""Walk over the keys of a program's rows: the device code of the Triton kernel."""

# Kernels have no Python types to annotate.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from vllm.triton_utils import tl, triton


@triton.jit
def _find_rows(
    block,
    query_start_loc_ptr,
    num_requests,
    blocks_per_request,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LOOKUP: tl.constexpr,
):
    """Return the request and the first row of a row block.

    Every request has `blocks_per_request` row blocks. If that is 0, requests have as many as they
    need, and those of request r begin at (its first row in the batch) // ROWS + r.
    """
    if blocks_per_request > 0:
        request = block // blocks_per_request
        first_row = block % blocks_per_request * ROWS
    else:
        request = block * 0 - 1
        for base in range(0, num_requests, LOOKUP):
            r = base + tl.arange(0, LOOKUP)
            begins = tl.load(query_start_loc_ptr + r, mask=r < num_requests, other=0)
            begins = begins * GROUP // ROWS + r
            request += tl.sum(((begins <= block) & (r < num_requests)).to(tl.int32), 0)
        first_token = tl.load(query_start_loc_ptr + request)
        first_row = (block - (first_token * GROUP // ROWS + request)) * ROWS
    return request, first_row


@triton.jit
def _attend(
    q,
    k,
    v,
    visible,
    acc,
    row_max,
    row_sum,
    scale,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add one tile to the online softmax (FlashAttention-2, arXiv 2307.08691); k, v [D, N]."""
    scores = tl.dot(q, k, input_precision=DOT) * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # Rows that have seen no key yet: -inf less -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    acc = tl.dot(
        weights.to(v.dtype), tl.trans(v), acc * decay[:, None], input_precision=DOT
    )
    return acc, new_max, row_sum * decay + tl.sum(weights, 1)


@triton.jit
def _cached(
    key_cache_ptr,
    value_cache_ptr,
    pages_ptr,
    key_page_stride,
    value_page_stride,
    first,
    most,
    kept,
    MASKED: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Load keys and values ``[D, N]`` of the cached positions from `first` on.

    With MASKED no page after `most` is read, and values that are not `kept` are zero: what
    lies there may be NaN, which weights of zero do not remove. Tiles begin at multiples of 16
    positions and pages are multiples of 16, so masks that are constant over 16 keep loads wide.
    """
    n = first + tl.arange(0, KEYS)
    d = tl.arange(0, HEAD)
    reached = n // 16 * 16 < most
    if PAGE % KEYS == 0:
        page = tl.load(pages_ptr + first // PAGE).to(tl.int64)
        n = tl.multiple_of(first % PAGE, 16) + tl.arange(0, KEYS)
    else:
        page = tl.load(pages_ptr + n // PAGE, mask=reached, other=0)
        page = tl.max_constancy(page.to(tl.int64), 16)
        n = n % PAGE
    key_place = page * key_page_stride + n * PIECE
    value_place = page * value_page_stride + n
    within = (d // PIECE) * (PAGE * PIECE) + d % PIECE
    keys = key_cache_ptr + key_place[None, :] + within[:, None]
    values = value_cache_ptr + value_place[None, :] + d[:, None] * PAGE
    if MASKED:
        k = tl.load(keys, mask=reached[None, :], other=0.0)
        v = tl.load(values, mask=reached[None, :], other=0.0)
        v = tl.where(kept[None, :], v, 0.0)
    else:
        k = tl.load(keys)
        v = tl.load(values)
    return k, v


@triton.jit
def _fresh(rows_ptr, stride, token, kept, HEAD: tl.constexpr):
    """Load keys or values ``[D, N]`` of this forward."""
    d = tl.arange(0, HEAD)
    rows = rows_ptr + token.to(tl.int64)[None, :] * stride + d[:, None]
    return tl.load(rows, mask=kept[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_requests", "blocks_per_request"])
def span_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    query_start_loc_ptr,
    span_start_ptr,
    keys_seen_ptr,
    block_table_ptr,
    out_ptr,
    lse_ptr,
    scale,
    num_requests,
    blocks_per_request,
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    split_stride,
    block_table_stride,
    key_page_stride,
    key_head_stride,
    value_page_stride,
    value_head_stride,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOKUP: tl.constexpr,
    MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend from rows of one request and KV head to their keys, or to one split of them.

    With several SPLITS, `out` is fp32 ``[SPLITS, T, H, D]`` and `lse` has log-sum-exps to base 2.
    """
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    request, first_row = _find_rows(
        *(
            block,
            query_start_loc_ptr,
            num_requests,
            blocks_per_request,
            GROUP,
            ROWS,
            LOOKUP,
        )
    )
    first_token = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - first_token
    if first_row >= length * GROUP:
        return

    row = first_row + tl.arange(0, ROWS)
    real = row < length * GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    d = tl.arange(0, HEAD)
    seen = tl.load(keys_seen_ptr + token, mask=real, other=0)
    start = tl.load(span_start_ptr + request)
    stop = start + length
    most = tl.max(seen, 0)
    least = tl.min(tl.where(real, seen, most), 0)

    # Tiles: cached tiles up to the span, cached tiles after it, then the span's own.
    whole = tl.minimum(start, least) // KEYS
    before = tl.cdiv(tl.minimum(most, start), KEYS)
    resume = tl.maximum(stop // KEYS, before)
    cached = before + tl.maximum(tl.cdiv(most, KEYS) - resume, 0)
    own = tl.cdiv(tl.minimum(tl.maximum(most - start, 0), length), KEYS)
    low, high = 0, cached + own
    if SPLITS > 1:
        tiles = tl.maximum(tl.cdiv(high, SPLITS), MIN_TILES)
        low = split * tiles
        high = tl.minimum(low + tiles, high)
        lse_ptr += split.to(tl.int64) * split_stride
        lse = lse_ptr + token * (tl.num_programs(1) * GROUP) + query_head
        if low >= high:
            tl.store(lse, tl.full([ROWS], float("-inf"), tl.float32), mask=real)
            return
        out_ptr += split.to(tl.int64) * split_stride * HEAD

    rows = (
        query_ptr
        + token[:, None] * query_stride
        + query_head[:, None] * HEAD
        + d[None, :]
    )
    q = tl.load(rows, mask=real[:, None], other=0.0)
    pages = block_table_ptr + request.to(tl.int64) * block_table_stride
    key_cache_ptr += head.to(tl.int64) * key_head_stride
    value_cache_ptr += head.to(tl.int64) * value_head_stride
    cache = (key_cache_ptr, value_cache_ptr, pages, key_page_stride, value_page_stride)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)

    # Stage 1: the cache, first what every row sees whole.
    for tile in tl.range(low, tl.minimum(high, whole), num_stages=STAGES):
        k, v = _cached(*cache, tile * KEYS, most, real, False, PAGE, HEAD, PIECE, KEYS)
        acc, row_max, row_sum = _attend(
            q, k, v, real, acc, row_max, row_sum, scale, False, DOT
        )
    for tile in tl.range(
        tl.maximum(low, whole), tl.minimum(high, cached), num_stages=1
    ):
        first = tl.where(tile < before, tile, tile - before + resume) * KEYS
        n = first + tl.arange(0, KEYS)
        kept = (n < most) & ((n < start) | (n >= stop))
        k, v = _cached(*cache, first, most, kept, True, PAGE, HEAD, PIECE, KEYS)
        visible = (n[None, :] < seen[:, None]) & kept[None, :]
        acc, row_max, row_sum = _attend(
            q, k, v, visible, acc, row_max, row_sum, scale, True, DOT
        )

    # Stage 2: the span's own keys.
    for tile in tl.range(tl.maximum(low, cached), high, num_stages=STAGES - 1):
        local = (tile - cached) * KEYS + tl.arange(0, KEYS)
        kept = local < length
        k = _fresh(key_ptr + head * HEAD, key_stride, first_token + local, kept, HEAD)
        v = _fresh(
            value_ptr + head * HEAD, value_stride, first_token + local, kept, HEAD
        )
        visible = ((start + local)[None, :] < seen[:, None]) & kept[None, :]
        acc, row_max, row_sum = _attend(
            q, k, v, visible, acc, row_max, row_sum, scale, True, DOT
        )

    # Stage 3: output; a row that saw nothing is zero.
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if SPLITS > 1:
        tl.store(lse, row_max + tl.log2(row_sum), mask=real)
    rows = (
        out_ptr + token[:, None] * out_stride + query_head[:, None] * HEAD + d[None, :]
    )
    tl.store(rows, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
