"""Run attention of a step of block-causal canvases by each variant that is timed."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Query heads, KV heads, head size.
HEADS = {"llada": (32, 32, 128), "dream": (28, 4, 128), "sdar": (32, 8, 128)}
COLD_BYTES = 256 << 20  # all caches together: more than any L2


@dataclass(frozen=True)
class Point:
    """Name one row of the table."""

    model: str
    requests: int
    blocks: int
    context: int
    block: int = 32

    @property
    def span(self) -> int:
        """Return the positions of a canvas."""
        return self.blocks * self.block

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of cached and fresh keys and values, which a forward reads once."""
        _, kv_heads, head = HEADS[self.model]
        return self.requests * (self.context + self.span) * kv_heads * head * 4

    @property
    def bytes(self) -> int:
        """Return all bytes that a forward must move."""
        heads, _, head = HEADS[self.model]
        return self.kv_bytes + self.requests * self.span * heads * head * 4

    @property
    def flops(self) -> int:
        """Return the floating-point operations of visible pairs."""
        heads, _, head = HEADS[self.model]
        keys = sum(self.context + self.block * (i + 1) for i in range(self.blocks))
        return 4 * self.requests * self.block * keys * heads * head


class Batch:
    """Make the inputs of one point: the same numbers in whichever layout the variant reads."""

    def __init__(self, point: Point, page: int, distinct: bool) -> None:
        torch.manual_seed(0)
        self.point, self.page = point, page
        heads, kv_heads, self.head = HEADS[point.model]
        requests, self.span = point.requests, point.span
        kwargs = {"device": "cuda", "dtype": torch.bfloat16}
        self.query = torch.randn(requests * self.span, heads, self.head, **kwargs)
        self.fresh = torch.randn(2, requests * self.span, kv_heads, self.head, **kwargs)
        self.out = torch.full_like(self.query, torch.nan)
        # Contexts that end inside pages, as committed tokens do.
        start = point.context - torch.arange(requests) * 7 % 64
        self.start = start.to("cuda", torch.int32)
        width = -(-(point.context + self.span) // page)
        self.table = torch.randperm(requests * width, device="cuda", dtype=torch.int32)
        self.table = self.table.view(requests, width)
        self.bounds = (
            torch.arange(requests + 1, device="cuda", dtype=torch.int32) * self.span
        )
        stops = (
            torch.arange(self.span, device="cuda") // point.block + 1
        ) * point.block
        self.seen = (self.start[:, None] + stops).flatten().to(torch.int32)
        layers = min(32, -(-COLD_BYTES // point.kv_bytes))
        shape = (layers, requests * width, kv_heads, page, 2 * self.head)
        if not distinct:
            shape = (layers, requests * width, page, kv_heads, 2 * self.head)
        self.caches = torch.randn(shape, **kwargs)
        # Sequences of one query segment each, and the canvas in the cache, which they read.
        self.start_loc = torch.arange(
            0, requests * self.span + 1, point.block, device="cuda", dtype=torch.int32
        )
        self.sequence_keys = self.seen[:: point.block].contiguous()
        self.sequence_table = self.table.repeat_interleave(point.blocks, 0)
        self.reach = int(self.seen.max())
        if not distinct:
            place = self.start[:, None] + torch.arange(self.span, device="cuda")
            slots = self.table.gather(1, place // page).long() * page + place % page
            for layer in self.caches:
                keys, values = layer.flatten(0, 1).split(self.head, -1)
                keys[slots.flatten()], values[slots.flatten()] = self.fresh

    def halves(self, layer: Tensor) -> tuple[Tensor, Tensor]:
        """Split a `unified` cache into keys and values, ``[P, N, K, D]`` each."""
        return layer.split(self.head, -1)

    def expected(self, requests: list[int], distinct: bool) -> Tensor:
        """Compute the reference's result for a few requests on the first cache."""
        from dllm_plugin.kernels.paged_attention.reference import attend_spans
        from dllm_plugin.kernels.paged_store import split_cache, store_kv_reference

        pages = self.table[requests].long()
        local = torch.arange(pages.numel(), device=pages.device, dtype=torch.int32)
        cache = self.caches[0][pages.flatten()]
        if not distinct:
            halves = cache.flatten(0, 1).split(self.head, -1)
            cache = torch.empty_like(
                cache.transpose(1, 2), memory_format=torch.contiguous_format
            )
            slots = torch.arange(len(halves[0]), device=pages.device)
            store_kv_reference(*halves, *split_cache(cache, self.head), slots)
        keys, values = split_cache(cache, self.head)
        rows = (torch.tensor(requests, device="cuda")[:, None] * self.span).add(
            torch.arange(self.span, device="cuda")
        )
        rows = rows.flatten()
        out = torch.empty_like(self.query[rows])
        bounds = (
            torch.arange(len(requests) + 1, device="cuda", dtype=torch.int32)
            * self.span
        )
        attend_spans(
            *(
                self.query[rows],
                self.fresh[0][rows],
                self.fresh[1][rows],
                keys,
                values,
                bounds,
            ),
            *(
                self.start[requests],
                self.seen[rows],
                local.view(pages.shape),
                self.head**-0.5,
                out,
                self.span,
            ),
        )
        return out.unflatten(0, (-1, self.span))


def fused(batch: Batch, **constants):
    """Prepare the fused kernel of the `distinct` layout."""
    from dllm_plugin.kernels.paged_attention.kernel import attend_spans
    from dllm_plugin.kernels.paged_store import split_cache

    units = torch.cuda.get_device_properties(0).multi_processor_count
    caches = [split_cache(layer, batch.head) for layer in batch.caches]

    def call(layer: int) -> None:
        attend_spans(
            *(
                batch.query,
                *batch.fresh,
                *caches[layer],
                batch.bounds,
                batch.start,
                batch.seen,
            ),
            *(batch.table, batch.head**-0.5, batch.out, batch.span, units),
            **constants,
        )

    return call


def fa(batch: Batch, splits: int):
    """Prepare one sequence per block on FlashAttention 3; with 0 splits it chooses their number."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    caches = [batch.halves(layer) for layer in batch.caches]

    def call(layer: int) -> None:
        flash_attn_varlen_func(
            *(
                batch.query,
                *caches[layer],
                batch.point.block,
                batch.start_loc,
                batch.reach,
            ),
            seqused_k=batch.sequence_keys,
            block_table=batch.sequence_table,
            causal=False,
            out=batch.out,
            fa_version=3,
            num_splits=splits,
        )

    return call


def triton(batch: Batch):
    """Prepare one sequence per block on vLLM's Triton attention."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    caches = [batch.halves(layer) for layer in batch.caches]
    ones = torch.ones(len(batch.sequence_keys), batch.fresh.shape[2], device="cuda")
    length = batch.point.block

    def call(layer: int) -> None:
        unified_attention(
            *(
                batch.query,
                *caches[layer],
                batch.out,
                batch.start_loc,
                length,
                batch.sequence_keys,
            ),
            *(batch.reach, batch.head**-0.5, False, (-1, -1), batch.sequence_table, 0),
            *(None, ones, ones),
        )

    return call


def cascade(batch: Batch):
    """Prepare a cascade: the context, the fresh canvas as pages of one block, and their merge."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    caches = [batch.halves(layer) for layer in batch.caches]
    blocks, requests = batch.point.blocks, batch.point.requests
    length = batch.point.block
    canvas = [half.unflatten(0, (-1, length)) for half in batch.fresh]
    index = torch.arange(requests * blocks, device="cuda", dtype=torch.int32)
    table = index.view(requests, blocks).repeat_interleave(blocks, 0)
    keys = (index % blocks + 1) * length

    def call(layer: int) -> None:
        prefix, prefix_lse = flash_attn_varlen_func(
            *(
                batch.query,
                *caches[layer],
                batch.span,
                batch.bounds,
                batch.point.context,
            ),
            seqused_k=batch.start,
            block_table=batch.table,
            return_softmax_lse=True,
            fa_version=3,
        )
        suffix, suffix_lse = flash_attn_varlen_func(
            *(batch.query, *canvas, length, batch.start_loc, batch.span),
            seqused_k=keys,
            block_table=table,
            return_softmax_lse=True,
            fa_version=3,
        )
        merge_attn_states(batch.out, prefix, prefix_lse, suffix, suffix_lse)

    return call


def flex(batch: Batch):
    """Prepare FlexAttention on gathered keys, without the time that gathering takes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # after eight shapes it would run uncompiled
    requests, longest = batch.point.requests, batch.table.shape[1] * batch.page
    seen = batch.seen.view(requests, batch.span)
    mask = create_block_mask(
        lambda b, h, q, n: n < seen[b, q],
        requests,
        None,
        batch.span,
        longest,
        device="cuda",
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    query = batch.query.unflatten(0, (requests, -1)).transpose(1, 2).contiguous()
    caches = []
    for layer in batch.caches:
        gathered = layer[batch.table.long()].flatten(1, 2).transpose(1, 2)
        caches.append([half.contiguous() for half in gathered.split(batch.head, -1)])

    def call(layer: int) -> None:
        result = compiled(query, *caches[layer], block_mask=mask, enable_gqa=True)
        batch.out.copy_(result.transpose(1, 2).flatten(0, 1))

    return call
