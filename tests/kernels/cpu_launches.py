"""Random launches of vLLM's kernels that the CPU runner replaces; a function each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from dllm_plugin.kernels import runner as cpu

# Kernel, grid, arguments, constants; each case below draws one.
Launch = tuple[Callable[..., None], tuple[int, ...], list[Any], dict[str, Any]]
POISON = -77
ONE_GROUP = {"BLOCK_SIZE": 8, "MULTI_GROUP": False}


def tensor(values: Any, dtype: torch.dtype = torch.int32, spare: int = 0) -> Tensor:
    """`values` as a tensor whose last axis is followed, in memory, by `spare` poisoned entries."""
    array = np.asarray(values)
    full = torch.full((*array.shape[:-1], array.shape[-1] + spare), POISON, dtype=dtype)
    full[..., : array.shape[-1]] = torch.from_numpy(array)
    return full[..., : array.shape[-1]]


def poisoned(*shape: int, dtype: torch.dtype = torch.int32, spare: int = 0) -> Tensor:
    return tensor(np.full(shape, POISON), dtype, spare)


def slots(rng: Generator, absent: bool = False) -> tuple[np.ndarray, int]:
    """Distinct request slots of a batch, and how many slots there are."""
    num_reqs = int(rng.integers(1, 9))
    idx = rng.permutation(num_reqs + 3)[:num_reqs]
    if absent:
        idx[rng.random(num_reqs) < 0.4] = -1
    return idx, num_reqs + 3


def bounds(lengths: np.ndarray, padding: int = 0) -> np.ndarray:
    """Cumulative lengths from zero, the last repeated for `padding` unused rows."""
    return np.pad(np.concatenate([[0], lengths.cumsum()]), (0, padding), mode="edge")


def apply_write(rng: Generator) -> Launch:
    rows, lengths = rng.permutation(11)[:7], rng.integers(0, 20, 7)
    dtype = (torch.int32, torch.float32, torch.int64)[rng.integers(3)]
    output = poisoned(11, 40, dtype=dtype, spare=5)
    contents = tensor(rng.integers(0, 1000, lengths.sum() + 3), dtype)
    writes = [
        tensor(rows),
        tensor(rng.integers(0, 20, 7)),
        contents,
        tensor(lengths.cumsum()),
    ]
    return cpu.apply_write, (7,), [output, output.stride(0), *writes, None], ONE_GROUP


def apply_write_elements(rng: Generator) -> Launch:
    idx, num_slots = slots(rng)
    cu_lens = tensor(np.arange(1, len(idx) + 1))
    writes = [
        tensor(idx),
        tensor(0 * idx),
        tensor(rng.integers(0, 1000, len(idx))),
        cu_lens,
    ]
    return (
        cpu.apply_write,
        (len(idx),),
        [poisoned(num_slots), 1, *writes, None],
        ONE_GROUP,
    )


def apply_write_groups(rng: Generator) -> Launch:
    widths = rng.integers(20, 40, 4)
    tables = tuple(poisoned(9, width) for width in widths)
    rows, lengths = rng.permutation(9)[:6], rng.integers(0, 12, 6)
    contents = tensor(rng.integers(0, 1000, lengths.sum()))
    writes = [
        tensor(rows),
        tensor(rng.integers(0, 8, 6)),
        contents,
        tensor(lengths.cumsum()),
    ]
    groups = tensor(rng.integers(0, 3, 6))  # the fourth table gets no write
    arguments = [tables, tensor(widths, torch.int64), *writes, groups]
    return cpu.apply_write, (6,), arguments, ONE_GROUP | {"MULTI_GROUP": True}


def gather_block_tables(rng: Generator) -> Launch:
    idx, num_slots = slots(rng)
    widths = rng.integers(1, 20, int(rng.integers(1, 4)))
    sources = tuple(tensor(rng.integers(0, 1000, (num_slots, w))) for w in widths)
    targets = tuple(poisoned(num_slots, w) for w in widths)
    num_blocks = tensor(
        rng.integers(0, widths[:, None] + 1, (len(widths), num_slots)), spare=2
    )
    arguments = [
        tensor(idx, torch.int64),
        sources,
        targets,
        tensor(widths, torch.int64),
    ]
    arguments += [num_blocks, num_blocks.stride(0), len(idx)]
    return (
        cpu.gather_block_tables,
        (len(widths), num_slots),
        arguments,
        {"BLOCK_SIZE": 8},
    )


def compute_slot_mappings(rng: Generator) -> Launch:
    idx, num_slots = slots(rng, absent=rng.random() < 0.6)
    query_start_loc = bounds(rng.integers(0, 21, len(idx)), padding=2)
    num_tokens = query_start_loc[-1]
    sizes = rng.choice([16, 24, 32, 128], 3)
    widths = -(-100 // sizes) + rng.integers(0, 3, 3)
    tables = tuple(tensor(rng.integers(0, 1000, (num_slots, w))) for w in widths)
    enabled = torch.tensor([True, rng.random() < 0.5, True])
    mappings = poisoned(3, num_tokens + 13, dtype=torch.int64, spare=3)
    arguments = [
        num_tokens.item() + 13,
        tensor(idx, torch.int64),
        tensor(query_start_loc),
    ]
    arguments += [tensor(rng.integers(0, 100, num_tokens + 5), torch.int64), tables]
    arguments += [tensor(widths, torch.int64), tensor(sizes), enabled, enabled]
    arguments += [mappings, mappings.stride(0), 0]
    constants = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 8}
    return cpu.compute_slot_mappings, (3, len(idx) + 1), arguments, constants


def prepare_prefill_inputs(rng: Generator) -> Launch:
    idx, num_slots = slots(rng)
    lookahead = int(rng.integers(1, 4))
    query_start_loc = bounds(rng.integers(0, 21, len(idx)), padding=2)
    prefill_lens, computed = (
        rng.integers(1, 30, num_slots),
        rng.integers(0, 30, num_slots),
    )
    all_token_ids = tensor(rng.integers(0, 1000, (num_slots, 50)), spare=4)
    following = poisoned(lookahead, num_slots, spare=2)
    arguments = [
        poisoned(query_start_loc[-1] + 3),
        following,
        following.stride(0),
        lookahead,
    ]
    arguments += [tensor(idx, torch.int64), tensor(query_start_loc), all_token_ids]
    arguments += [all_token_ids.stride(0), tensor(prefill_lens), tensor(computed)]
    constants = {"BLOCK_SIZE": 8, "LOOKAHEAD_BLOCK": 4}
    return cpu.prepare_prefill_inputs, (len(idx),), arguments, constants


def prepare_pos_seq_lens(rng: Generator) -> Launch:
    idx, num_slots = slots(rng)
    query_start_loc = bounds(rng.integers(0, 21, len(idx)), padding=3)
    arguments = [
        poisoned(query_start_loc[-1] + 3, dtype=torch.int64),
        poisoned(num_slots + 2),
    ]
    arguments += [tensor(idx, torch.int64), tensor(query_start_loc)]
    arguments += [tensor(rng.integers(0, 1000, num_slots)), num_slots]
    return cpu.prepare_pos_seq_lens, (len(idx) + 1,), arguments, {"BLOCK_SIZE": 8}


def combine_sampled_and_draft_tokens(rng: Generator) -> Launch:
    num_new = int(rng.integers(2))
    idx, num_slots = slots(rng)
    num_drafts = rng.integers(0, 8, len(idx)) * (rng.random(len(idx)) < 0.7)
    num_logits = num_drafts + num_new
    query_lens = num_logits + rng.integers(0, 5, len(idx)) * (
        rng.random(len(idx)) < 0.5
    )
    prefill_len = rng.integers(12, 30, num_slots)
    # Before, at, across and past the end of the prompt.
    ahead = rng.choice([-2, 0, 0, 1, 9, 99], len(idx))
    seq_lens = prefill_len[idx] + np.where(ahead == 99, num_logits, ahead)
    drafts = tensor(rng.integers(0, 1000, (num_slots, 7)), torch.int64, spare=2)
    arguments = [poisoned(query_lens.sum() + 3), tensor(idx, torch.int64)]
    arguments += [tensor(rng.integers(0, 1000, (num_slots, 1)), torch.int64)]
    arguments += [
        tensor(bounds(query_lens, padding=2)),
        tensor(np.pad(seq_lens, (0, 3))),
    ]
    arguments += [
        tensor(prefill_len),
        drafts,
        drafts.stride(0),
        tensor(bounds(num_logits)),
    ]
    arguments += [poisoned(num_logits.sum() + 3, dtype=torch.int64)]
    constants = {"BLOCK_SIZE": 8, "NUM_NEW_SAMPLED_TOKENS": num_new}
    return cpu.combine_sampled_and_draft_tokens, (len(idx),), arguments, constants


def post_update(rng: Generator) -> Launch:
    full = rng.random() < 0.6
    idx, num_slots = slots(rng, absent=True)
    num_sampled = rng.integers(0, 7, len(idx)) * (rng.random(len(idx)) < 0.7)
    counts = tensor(rng.integers(0, 9, (num_slots, 5)), spare=2) if full else None
    sampled = tensor(rng.integers(0, 5, (len(idx), 6)), torch.int64, spare=2)
    all_token_ids = poisoned(num_slots, 40, spare=4)
    arguments = [tensor(idx, torch.int64), tensor(rng.integers(0, 50, num_slots))]
    arguments += [poisoned(num_slots, 1, dtype=torch.int64), counts, 7 if full else 0]
    arguments += [sampled, sampled.stride(0), tensor(num_sampled)]
    arguments += [tensor(rng.integers(0, 7, len(idx)))]
    arguments += [
        tensor(bounds(rng.integers(0, 9, len(idx)), padding=2)) if full else None
    ]
    arguments += [
        all_token_ids,
        all_token_ids.stride(0),
        tensor(rng.integers(0, 34, num_slots)),
    ]
    return cpu.post_update, (len(idx),), arguments, {"num_warps": 1}


def expand_idx_mapping(rng: Generator) -> Launch:
    idx, _ = slots(rng, absent=True)
    cu_num_logits = bounds(rng.integers(0, 8, len(idx)))
    arguments = [
        tensor(idx, torch.int64),
        poisoned(cu_num_logits[-1] + 3, dtype=torch.int64),
    ]
    arguments += [poisoned(cu_num_logits[-1] + 3), tensor(cu_num_logits)]
    return cpu.expand_idx_mapping, (len(idx),), arguments, {"BLOCK_SIZE": 8}


def post_update_num_computed_tokens(rng: Generator) -> Launch:
    idx, num_slots = slots(rng)
    query_start_loc = tensor(bounds(rng.integers(0, 9, len(idx)), padding=2))
    arguments = [
        tensor(idx, torch.int64),
        tensor(rng.integers(0, 50, num_slots)),
        query_start_loc,
    ]
    return cpu.post_update_num_computed_tokens, (len(idx),), arguments, {}


def prompt_logprobs_token_ids(rng: Generator) -> Launch:
    idx, num_slots = slots(rng)
    query_start_loc = bounds(rng.integers(0, 21, len(idx)))
    all_token_ids = tensor(rng.integers(0, 1000, (num_slots, 60)), spare=4)
    arguments = [poisoned(query_start_loc[-1] + 3, dtype=torch.int64)]
    arguments += [tensor(query_start_loc), tensor(idx, torch.int64)]
    arguments += [tensor(rng.integers(0, 30, num_slots)), all_token_ids]
    arguments += [all_token_ids.stride(0)]
    return cpu.prompt_logprobs_token_ids, (len(idx),), arguments, {"BLOCK_SIZE": 8}


def scored(rng: Generator, columns: int) -> list[Any]:
    """Logits of some rows, and ids of each."""
    rows, vocab = int(rng.integers(1, 6)), 21
    logits = tensor(rng.normal(size=(rows, vocab)).round(1), torch.float32, spare=3)
    return [logits, tensor(rng.integers(0, vocab, (rows, columns)), torch.int64)]


def topk_log_softmax(rng: Generator) -> Launch:
    columns = int(rng.integers(1, 12))
    logits, ids = scored(rng, columns)
    output = poisoned(len(ids), columns, dtype=torch.float32)
    arguments = [output, logits, logits.stride(0), ids, ids.stride(0), columns, 21]
    constants = {"BLOCK_SIZE": 8, "TOPK_BLOCK_SIZE": 4}
    return cpu.topk_log_softmax, (len(ids),), arguments, constants


def ranks(rng: Generator) -> Launch:
    logits, ids = scored(rng, 1)
    output = poisoned(len(ids), dtype=torch.int64)
    arguments = [output, logits, logits.stride(0), ids[:, 0].contiguous(), 21]
    return cpu.ranks, (len(ids),), arguments, {"BLOCK_SIZE": 8}


CASES = (
    *(apply_write, apply_write_elements, apply_write_groups),
    *(gather_block_tables, compute_slot_mappings),
    *(prepare_prefill_inputs, prepare_pos_seq_lens, combine_sampled_and_draft_tokens),
    *(post_update, expand_idx_mapping, post_update_num_computed_tokens),
    *(prompt_logprobs_token_ids, topk_log_softmax, ranks),
)
