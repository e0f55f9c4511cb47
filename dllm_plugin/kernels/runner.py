"""Replace the twelve Triton kernels of vLLM's model runner v2 by NumPy, on CPUs without Triton.

Each function takes the arguments of the kernel that it replaces, by the same names in the same
order (long lists are wrapped by hand); `BLOCK_SIZE` and its like only tune Triton. vLLM does not
hand over the launch grid, so counts come from shapes. Pointers arrive as CPU tensors and are
written in place through NumPy views: these run in every step, and NumPy's cost per call is a
fraction of torch's.

Rows of `idx_mapping` below zero own no request: they read nothing and write nothing but padding.

Shapes: R requests in the batch, N request slots, G KV cache groups, T tokens, W staged writes.
"""

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, triton
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils.math_utils import next_power_of_2


def _flat(tensor: Tensor) -> np.ndarray:
    """Return the tensor's memory as one axis, gaps included: index it by row * stride."""
    if tensor.is_contiguous():
        return tensor.numpy().reshape(-1)
    extent = 1 + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return torch.as_strided(tensor, (extent,), (1,)).numpy()


def _spans(starts: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """Concatenate `arange(start, start + length)` over the pairs; [sum of lengths]."""
    ends = lengths.cumsum()
    shift = starts - ends + lengths
    if len(ends) == 1:
        return np.arange(shift[0], shift[0] + ends[0])
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)


@functools.lru_cache(maxsize=256)
def _memory(address: int, rows: int, stride: int) -> np.ndarray:
    """View the memory at `address` as int32 [rows, stride]; cached by address, so never stale."""
    memory = (ctypes.c_int32 * (rows * stride)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, stride)


def _tables(pointers: Tensor, strides: Tensor, rows: int) -> Iterator[np.ndarray]:
    """Yield the first `rows` rows of each group's int32 table, [rows, stride]."""
    for address, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        yield _memory(address, rows, stride)


def apply_write(
    output_ptr: Tensor, output_stride: int | Tensor, write_indices_ptr: Tensor,
    write_starts_ptr: Tensor, write_contents_ptr: Tensor, write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None, BLOCK_SIZE: int, MULTI_GROUP: bool
) -> None:  # fmt: skip
    """Apply staged writes [W]: row `index`, from column `start`, the next stretch of `contents`.

    With `MULTI_GROUP`, `output_ptr` and `output_stride` [G] describe one int32 table a group.
    """
    rows = write_indices_ptr.numpy().astype(np.int64)
    starts = write_starts_ptr.numpy()
    contents = write_contents_ptr.numpy()
    ends = write_cu_lens_ptr.numpy()
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    if not MULTI_GROUP:
        target = _spans(rows * output_stride + starts, lengths)
        _flat(output_ptr)[target] = contents[: ends[-1]]
        return
    assert isinstance(output_stride, Tensor) and write_group_ids_ptr is not None
    tables = _tables(output_ptr, output_stride, int(rows.max()) + 1)
    for group, table in enumerate(tables):
        mine = np.flatnonzero(write_group_ids_ptr.numpy() == group)
        target = _spans(rows[mine] * table.shape[1] + starts[mine], lengths[mine])
        table.reshape(-1)[target] = contents[
            _spans((ends - lengths)[mine], lengths[mine])
        ]


def gather_block_tables(
    batch_idx_to_req_idx: Tensor, src_block_table_ptrs: Tensor, dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor, num_blocks_ptr: Tensor, num_blocks_stride: int, num_reqs: int,
    BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Copy the used part of the requests' block-table rows [N, stride] to rows [0, R) per group.

    vLLM zeroes the padded rows only; how many there are is in the grid, so all the rest is zeroed.
    """
    idx_R = batch_idx_to_req_idx.numpy()
    used_GR = np.where(idx_R < 0, 0, num_blocks_ptr.numpy()[:, idx_R])
    num_slots = num_blocks_ptr.shape[1]
    sources = _tables(src_block_table_ptrs, block_table_strides, num_slots)
    targets = _tables(dst_block_table_ptrs, block_table_strides, num_slots)
    for used_R, source, target in zip(used_GR, sources, targets, strict=True):
        width = int(used_R.max())
        used = np.arange(width) < used_R[:, None]
        np.copyto(target[:num_reqs, :width], source[idx_R, :width], where=used)
        target[num_reqs:] = 0


def compute_slot_mappings(
    max_num_tokens: int, idx_mapping: Tensor, query_start_loc: Tensor, pos: Tensor,
    block_table_ptrs: Tensor, block_table_strides: Tensor, block_sizes: Tensor,
    slot_mapping_enabled: Tensor, dcp_sharded: Tensor, slot_mappings_ptr: Tensor,
    slot_mappings_stride: int, cp_rank: int, CP_SIZE: int, CP_INTERLEAVE: int, PAD_ID: int,
    TRITON_BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Compute every token's KV slot, [G, max_num_tokens]; PAD_ID after the last token.

    Tokens of absent requests get PAD_ID too.
    """
    if CP_SIZE != 1:
        raise ValueError(
            f"context parallelism (size {CP_SIZE}) is not supported on a CPU without Triton: "
            "leave decode_context_parallel_size and prefill_context_parallel_size at 1"
        )
    idx_R = idx_mapping.numpy()
    bounds = query_start_loc.numpy()[: len(idx_R) + 1]
    first, last = bounds[0], bounds[-1]
    slots_GT = slot_mappings_ptr.numpy()
    slots_GT[:, last:max_num_tokens] = PAD_ID

    tokens: slice | np.ndarray = slice(first, last)
    row_T = np.repeat(idx_R, bounds[1:] - bounds[:-1])
    pos_T = pos.numpy()[first:last]
    if idx_R.min() < 0:
        slots_GT[:, first:last] = PAD_ID
        real = np.flatnonzero(row_T >= 0)
        tokens, row_T, pos_T = first + real, row_T[real], pos_T[real]

    tables = _tables(
        block_table_ptrs, block_table_strides, max(int(idx_R.max()), 0) + 1
    )
    enabled, sizes = slot_mapping_enabled.tolist(), block_sizes.tolist()
    for group, table in enumerate(tables):
        if not enabled[group]:
            slots_GT[group, first:last] = PAD_ID
            continue
        page_T = pos_T // (size := sizes[group])
        # number * size + pos % size, without a second division.
        slots_GT[group, tokens] = (table[row_T, page_T] - page_T) * size + pos_T


def prepare_prefill_inputs(
    input_ids_ptr: Tensor, next_prefill_tokens_ptr: Tensor, next_prefill_tokens_stride: int,
    num_lookahead: int, idx_mapping_ptr: Tensor, query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor, all_token_ids_stride: int, prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor, BLOCK_SIZE: int, LOOKAHEAD_BLOCK: int
) -> None:  # fmt: skip
    """Write input ids of requests still in prefill, and the prompt tokens that follow, [L, N]."""
    idx_R = idx_mapping_ptr.numpy()
    left_R = (prefill_lens_ptr.numpy() - num_computed_tokens_ptr.numpy())[idx_R]
    rows = np.flatnonzero((left_R > 0) & (idx_R >= 0))
    bounds = query_start_loc_ptr.numpy()
    starts = bounds[rows]
    lengths = bounds[rows + 1] - starts
    idx = idx_R[rows]
    all_tokens = _flat(all_token_ids_ptr)
    source = idx * all_token_ids_stride + num_computed_tokens_ptr.numpy()[idx]
    input_ids_ptr.numpy()[_spans(starts, lengths)] = all_tokens[_spans(source, lengths)]

    ahead = np.arange(num_lookahead)[:, None]
    inside = ahead < left_R[rows] - lengths
    follow = all_tokens[np.where(inside, source + lengths + ahead, 0)]
    next_prefill_tokens_ptr.numpy()[:num_lookahead, idx] = np.where(inside, follow, 0)


def prepare_pos_seq_lens(
    pos_ptr: Tensor, seq_lens_ptr: Tensor, idx_mapping_ptr: Tensor, query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor, max_num_reqs: int, BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Write positions [T] and sequence lengths [N] of the step; lengths of unused rows are zero."""
    idx_R = idx_mapping_ptr.numpy()
    num_reqs = len(idx_R)
    bounds = query_start_loc_ptr.numpy()[: num_reqs + 1]
    lengths = bounds[1:] - bounds[:-1]
    computed_R = np.where(idx_R < 0, 0, num_computed_tokens_ptr.numpy()[idx_R])
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:num_reqs] = computed_R + lengths
    seq_lens[num_reqs:max_num_reqs] = 0
    pos_ptr.numpy()[bounds[0] : bounds[-1]] = _spans(computed_R, lengths)


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Tensor, idx_mapping_ptr: Tensor, last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor, seq_lens_ptr: Tensor, prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor, draft_tokens_stride: int, cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor, BLOCK_SIZE: int, NUM_NEW_SAMPLED_TOKENS: int = 1
) -> None:  # fmt: skip
    """Write which rows need logits, and sampled and draft tokens as right-aligned input ids."""
    idx_R = idx_mapping_ptr.numpy()
    num_reqs = len(idx_R)
    cu_num_logits = cu_num_logits_ptr.numpy()[: num_reqs + 1]
    num_logits_R = cu_num_logits[1:] - cu_num_logits[:-1]
    end_R = query_start_loc_ptr.numpy()[1 : num_reqs + 1]
    first_R = end_R - num_logits_R
    logits_indices_ptr.numpy()[cu_num_logits[0] : cu_num_logits[-1]] = _spans(
        first_R, num_logits_R
    )

    input_ids = input_ids_ptr.numpy()
    seq_len_R = seq_lens_ptr.numpy()[:num_reqs]
    prefill_len_R = prefill_len_ptr.numpy()[idx_R]
    generating_R = (seq_len_R > prefill_len_R) & (idx_R >= 0)
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # A row that starts inside the prompt has prompt tokens there: they stay.
        rows = np.flatnonzero(
            generating_R & (seq_len_R - num_logits_R >= prefill_len_R)
        )
        input_ids[first_R[rows]] = _flat(last_sampled_tokens_ptr)[idx_R[rows]]
    num_drafts_R = np.maximum(num_logits_R - NUM_NEW_SAMPLED_TOKENS, 0) * generating_R
    # A suffix may be longer than the canvas; `state.refreshed` writes what is left out here.
    stored_R = np.minimum(num_drafts_R, draft_tokens_stride)
    drafts = _flat(draft_tokens_ptr)[_spans(idx_R * draft_tokens_stride, stored_R)]
    input_ids[_spans(end_R - num_drafts_R, stored_R)] = drafts


def post_update(
    idx_mapping_ptr: Tensor, num_computed_tokens_ptr: Tensor, last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None, output_bin_counts_stride: int,
    sampled_tokens_ptr: Tensor, sampled_tokens_stride: int, num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor, query_start_loc_ptr: Tensor | None, all_token_ids_ptr: Tensor,
    all_token_ids_stride: int, total_len_ptr: Tensor,
    num_warps: int = 1,  # a launch option that vLLM passes with the arguments
) -> None:  # fmt: skip
    """Append the sampled tokens [R, S] to their requests and advance the computed tokens [N]."""
    rows = np.flatnonzero(idx_mapping_ptr.numpy() >= 0)
    idx = idx_mapping_ptr.numpy()[rows]
    computed = -num_rejected_ptr.numpy()[rows]
    if query_start_loc_ptr is not None:
        bounds = query_start_loc_ptr.numpy()
        computed += bounds[rows + 1] - bounds[rows]
    num_computed_tokens_ptr.numpy()[idx] += computed

    num_sampled = num_sampled_ptr.numpy()[rows]
    emitting = np.flatnonzero(num_sampled > 0)
    if not len(emitting):
        return  # the usual step of a diffusion model: nothing is committed
    rows, idx, num_sampled = rows[emitting], idx[emitting], num_sampled[emitting]
    sampled = _flat(sampled_tokens_ptr)
    source = rows * sampled_tokens_stride
    _flat(last_sampled_tokens_ptr)[idx] = sampled[source + num_sampled - 1]
    tokens = sampled[_spans(source, num_sampled)]
    total_len = total_len_ptr.numpy()
    target = _spans(idx * all_token_ids_stride + total_len[idx], num_sampled)
    _flat(all_token_ids_ptr)[target] = tokens
    total_len[idx] += num_sampled
    if output_bin_counts_ptr is not None:
        counted = np.repeat(idx * output_bin_counts_stride, num_sampled) + tokens
        np.add.at(_flat(output_bin_counts_ptr), counted, 1)  # a token may repeat


def expand_idx_mapping(
    idx_mapping_ptr: Tensor, expanded_idx_mapping_ptr: Tensor, expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor, BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Write each logits row's request slot and its place among the request's logits rows."""
    idx_R = idx_mapping_ptr.numpy()
    bounds = cu_num_logits_ptr.numpy()[: len(idx_R) + 1]
    lengths = bounds[1:] - bounds[:-1]
    expanded_idx_mapping_ptr.numpy()[bounds[0] : bounds[-1]] = np.repeat(idx_R, lengths)
    expanded_local_pos_ptr.numpy()[bounds[0] : bounds[-1]] = _spans(0, lengths)


def post_update_num_computed_tokens(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
) -> None:
    """Advance the computed tokens [N] by each request's query length."""
    rows = np.flatnonzero(idx_mapping_ptr.numpy() >= 0)
    bounds = query_start_loc_ptr.numpy()
    idx = idx_mapping_ptr.numpy()[rows]
    num_computed_tokens_ptr.numpy()[idx] += bounds[rows + 1] - bounds[rows]


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Tensor, query_start_loc_ptr: Tensor, idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor, all_token_ids_ptr: Tensor, all_token_ids_stride: int,
    BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Write the token after each computed one, [T]; what lies after a row's end is not read."""
    idx_R = idx_mapping_ptr.numpy()
    bounds = query_start_loc_ptr.numpy()[: len(idx_R) + 1]
    first_R = idx_R * all_token_ids_stride + num_computed_tokens_ptr.numpy()[idx_R] + 1
    tokens = _flat(all_token_ids_ptr)
    source = _spans(first_R, bounds[1:] - bounds[:-1])
    target = prompt_logprobs_token_ids_ptr.numpy()
    target[bounds[0] : bounds[-1]] = tokens.take(source, mode="clip")


def topk_log_softmax(
    output_ptr: Tensor, logits_ptr: Tensor, logits_stride: int, topk_ids_ptr: Tensor,
    topk_ids_stride: int, topk: int, vocab_size: int, BLOCK_SIZE: int, TOPK_BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Write the log-probabilities of some ids of each row, float32 [T, topk]."""
    scores = logits_ptr.to(torch.float32).log_softmax(dim=1)
    output_ptr.copy_(scores.gather(1, topk_ids_ptr))


def ranks(
    output_ptr: Tensor, logits_ptr: Tensor, logits_stride: int, token_ids_ptr: Tensor,
    vocab_size: int, BLOCK_SIZE: int
) -> None:  # fmt: skip
    """Write how many ids of each row are as likely as its token, [T]."""
    chosen = logits_ptr.gather(1, token_ids_ptr[:, None])
    output_ptr.copy_((logits_ptr >= chosen).sum(dim=1))


_GPU = "vllm.v1.worker.gpu"
KERNELS: dict[str, Callable[..., None]] = {
    f"{_GPU}.buffer_utils._apply_write_kernel": apply_write,
    f"{_GPU}.block_table._gather_block_tables_kernel": gather_block_tables,
    f"{_GPU}.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    f"{_GPU}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        prompt_logprobs_token_ids
    ),
    f"{_GPU}.sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    f"{_GPU}.sample.logprob._ranks_kernel": ranks,
}
for _kernel in (
    prepare_prefill_inputs,
    prepare_pos_seq_lens,
    combine_sampled_and_draft_tokens,
    post_update,
    expand_idx_mapping,
    post_update_num_computed_tokens,
):
    KERNELS[f"{_GPU}.input_batch._{_kernel.__name__}_kernel"] = _kernel


def _complete_triton_placeholder() -> None:
    """Add to vLLM's placeholder for Triton the one helper that the runner calls on the host.

    The project's only assignment to an attribute of vLLM: no registry covers host helpers.
    """
    if "next_power_of_2" not in vars(triton):
        triton.next_power_of_2 = next_power_of_2


@functools.cache
def install() -> None:
    """Register these as model runner v2's kernels, once per process, on a CPU without Triton."""
    if HAS_TRITON or not current_platform.is_cpu():
        return
    _complete_triton_placeholder()
    # vLLM looks into every loaded module, deprecated names of torch and all.
    with warnings.catch_warnings(action="ignore"):
        register_kernels(KERNELS)
