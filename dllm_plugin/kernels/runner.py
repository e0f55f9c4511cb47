"""Replace the twelve Triton kernels of vLLM's model runner v2 by NumPy, on CPUs without Triton.

Each function takes the arguments of the kernel that it replaces, by the same names in the same
order; `BLOCK_SIZE` and its like only tune Triton. vLLM does not hand over the launch grid, so
counts come from shapes. Pointers arrive as CPU tensors and are written in place through NumPy
views, whose cost per call is a fraction of torch's: these run in every step.

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
    extent = 1
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (n - 1) * step
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
    output_ptr: Tensor,
    output_stride: int | Tensor,
    write_indices_ptr: Tensor,
    write_starts_ptr: Tensor,
    write_contents_ptr: Tensor,
    write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Apply staged writes [W]: row `index`, from column `start`, the next stretch of `contents`."""
    # With MULTI_GROUP `output_ptr` and `output_stride` [G] describe one int32 table a group.
    rows = write_indices_ptr.numpy().astype(np.int64)
    starts, contents = write_starts_ptr.numpy(), write_contents_ptr.numpy()
    ends = write_cu_lens_ptr.numpy()
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    if not MULTI_GROUP:
        target = _spans(rows * output_stride + starts, lengths)
        _flat(output_ptr)[target] = contents[: ends[-1]]
        return
    assert isinstance(output_stride, Tensor) and write_group_ids_ptr is not None
    tables = _tables(output_ptr, output_stride, int(rows.max()) + 1)
    begins, groups = ends - lengths, write_group_ids_ptr.numpy()
    for group, table in enumerate(tables):
        mine = np.flatnonzero(groups == group)
        first, counts = rows[mine] * table.shape[1] + starts[mine], lengths[mine]
        source = _spans(begins[mine], counts)
        table.reshape(-1)[_spans(first, counts)] = contents[source]


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks_ptr: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the used part of the requests' block-table rows [N, stride] to rows [0, R) per group."""
    # vLLM zeroes padded rows only, whose number is in the grid: here all the rest is zeroed.
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
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings_ptr: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Compute the KV slots of tokens, [G, max_num_tokens]; PAD_ID for absent requests and after."""
    if CP_SIZE != 1:
        raise ValueError(
            f"context parallelism (size {CP_SIZE}) is not supported on a CPU without Triton: "
            "leave decode_context_parallel_size and prefill_context_parallel_size at 1"
        )
    idx_R = idx_mapping.numpy()
    bounds = query_start_loc.numpy()[: len(idx_R) + 1]
    first, last = bounds[0], bounds[-1]
    slots_GT = slot_mappings_ptr.numpy()
    slots_GT[:, first:max_num_tokens] = PAD_ID
    tokens: slice | np.ndarray = slice(first, last)
    row_T = np.repeat(idx_R, bounds[1:] - bounds[:-1])
    pos_T = pos.numpy()[first:last]
    if idx_R.min() < 0:
        real = np.flatnonzero(row_T >= 0)
        tokens, row_T, pos_T = first + real, row_T[real], pos_T[real]
    num_rows = max(int(idx_R.max()), 0) + 1
    tables = _tables(block_table_ptrs, block_table_strides, num_rows)
    enabled, sizes = slot_mapping_enabled.tolist(), block_sizes.tolist()
    for group, table in enumerate(tables):
        if enabled[group]:
            page_T = pos_T // (size := sizes[group])
            # number * size + pos % size, without a second division.
            first_T = (table[row_T, page_T] - page_T) * size
            slots_GT[group, tokens] = first_T + pos_T


def prepare_prefill_inputs(
    input_ids_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
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
    tokens = all_tokens[_spans(source, lengths)]
    input_ids_ptr.numpy()[_spans(starts, lengths)] = tokens
    ahead = np.arange(num_lookahead)[:, None]
    inside = ahead < left_R[rows] - lengths
    follow = all_tokens[np.where(inside, source + lengths + ahead, 0)]
    next_prefill_tokens_ptr.numpy()[:num_lookahead, idx] = np.where(inside, follow, 0)


def prepare_pos_seq_lens(
    pos_ptr: Tensor,
    seq_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
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
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write which rows need logits, and sampled and draft tokens as right-aligned input ids."""
    idx_R = idx_mapping_ptr.numpy()
    num_reqs = len(idx_R)
    bounds = cu_num_logits_ptr.numpy()[: num_reqs + 1]
    count_R = bounds[1:] - bounds[:-1]
    end_R = query_start_loc_ptr.numpy()[1 : num_reqs + 1]
    first_R = end_R - count_R
    logits_indices_ptr.numpy()[bounds[0] : bounds[-1]] = _spans(first_R, count_R)
    input_ids = input_ids_ptr.numpy()
    seq_len_R = seq_lens_ptr.numpy()[:num_reqs]
    prefill_len_R = prefill_len_ptr.numpy()[idx_R]
    generating_R = (seq_len_R > prefill_len_R) & (idx_R >= 0)
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # A row that starts inside the prompt has prompt tokens there: they stay.
        past_R = seq_len_R - count_R >= prefill_len_R
        rows = np.flatnonzero(generating_R & past_R)
        input_ids[first_R[rows]] = _flat(last_sampled_tokens_ptr)[idx_R[rows]]
    drafts_R = np.maximum(count_R - NUM_NEW_SAMPLED_TOKENS, 0) * generating_R
    # A suffix may be longer than the canvas; `state.refreshed` writes what is left out here.
    stored_R = np.minimum(drafts_R, draft_tokens_stride)
    source = _spans(idx_R * draft_tokens_stride, stored_R)
    target = _spans(end_R - drafts_R, stored_R)
    input_ids[target] = _flat(draft_tokens_ptr)[source]


def post_update(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor | None,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    total_len_ptr: Tensor,
    num_warps: int = 1,  # a launch option that vLLM passes with the arguments
) -> None:
    """Append the sampled tokens [R, S] to their requests and advance the computed tokens [N]."""
    idx_R = idx_mapping_ptr.numpy()
    rows = np.flatnonzero(idx_R >= 0)
    idx = idx_R[rows]
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
    idx_mapping_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Write each logits row's request slot and its place among the request's logits rows."""
    idx_R = idx_mapping_ptr.numpy()
    bounds = cu_num_logits_ptr.numpy()[: len(idx_R) + 1]
    lengths = bounds[1:] - bounds[:-1]
    rows = slice(bounds[0], bounds[-1])
    expanded_idx_mapping_ptr.numpy()[rows] = np.repeat(idx_R, lengths)
    expanded_local_pos_ptr.numpy()[rows] = _spans(0, lengths)


def post_update_num_computed_tokens(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
) -> None:
    """Advance the computed tokens [N] by each request's query length."""
    idx_R, bounds = idx_mapping_ptr.numpy(), query_start_loc_ptr.numpy()
    rows = np.flatnonzero(idx_R >= 0)
    lengths = bounds[rows + 1] - bounds[rows]
    num_computed_tokens_ptr.numpy()[idx_R[rows]] += lengths


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the token after each computed one, [T]; what lies after a row's end is not read."""
    idx_R = idx_mapping_ptr.numpy()
    bounds = query_start_loc_ptr.numpy()[: len(idx_R) + 1]
    computed_R = num_computed_tokens_ptr.numpy()[idx_R]
    first_R = idx_R * all_token_ids_stride + computed_R + 1
    source = _spans(first_R, bounds[1:] - bounds[:-1])
    tokens = _flat(all_token_ids_ptr).take(source, mode="clip")
    prompt_logprobs_token_ids_ptr.numpy()[bounds[0] : bounds[-1]] = tokens


def topk_log_softmax(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    topk_ids_ptr: Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the log-probabilities of some ids of each row, float32 [T, topk]."""
    scores = logits_ptr.to(torch.float32).log_softmax(dim=1)
    output_ptr.copy_(scores.gather(1, topk_ids_ptr))


def ranks(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    token_ids_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write how many ids of each row are as likely as its token, [T]."""
    chosen = logits_ptr.gather(1, token_ids_ptr[:, None])
    output_ptr.copy_((logits_ptr >= chosen).sum(dim=1))


KERNELS: dict[str, Callable[..., None]] = {}


def _add(module: str, *kernels: Callable[..., None]) -> None:
    """List kernels under the names that vLLM's have in a module of its runner."""
    for kernel in kernels:
        name = f"{module}._{kernel.__name__}_kernel"
        KERNELS[f"vllm.v1.worker.gpu.{name}"] = kernel


_add("buffer_utils", apply_write)
_add("block_table", gather_block_tables, compute_slot_mappings)
_add("input_batch", prepare_prefill_inputs, prepare_pos_seq_lens)
_add("input_batch", combine_sampled_and_draft_tokens, expand_idx_mapping)
_add("input_batch", post_update, post_update_num_computed_tokens)
_add("sample.prompt_logprob", prompt_logprobs_token_ids)
_add("sample.logprob", topk_log_softmax, ranks)


@functools.cache
def install() -> None:
    """Register these as model runner v2's kernels, once per process, on a CPU without Triton."""
    if HAS_TRITON or not current_platform.is_cpu():
        return
    # The project's only assignment to an attribute of vLLM: no registry covers host helpers.
    if "next_power_of_2" not in vars(triton):
        triton.next_power_of_2 = next_power_of_2
    # vLLM looks into every loaded module, deprecated names of torch and all.
    with warnings.catch_warnings(action="ignore"):
        register_kernels(KERNELS)
