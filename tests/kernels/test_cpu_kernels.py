"""The CPU kernels against vLLM's own Triton kernels, run by Triton's interpreter.

Every tensor argument is compared over its whole storage, so what must stay untouched counts too.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor
from vllm.triton_utils import HAS_TRITON, triton

from dllm_plugin.kernels import runner as cpu

# Kernel, grid, arguments, constants; each case below draws one.
Launch = tuple[Callable[..., None], tuple[int, ...], list[Any], dict[str, Any]]
NAMES = {kernel: name for name, kernel in cpu.KERNELS.items()}
POISON = -77
ONE_GROUP = {"BLOCK_SIZE": 8, "MULTI_GROUP": False}
SEEDS = range(5)


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


def pointers(argument: Any) -> Any:
    if not isinstance(argument, tuple):
        return argument
    return torch.tensor([table.data_ptr() for table in argument], dtype=torch.uint64)


def test_rows_without_a_request_touch_no_state():
    """Where Triton would read out of bounds: row -1 must not reach the last request slot."""
    idx, query_start_loc = torch.tensor([-1, 0]), tensor([0, 3, 5])
    computed, prefill_len = tensor([2, 9, 9]), tensor([4, 20, 20])

    table, out = tensor([[5, 6], [7, 8], [9, 9]]), poisoned(3, 2)
    tables = [pointers((table,)), pointers((out,)), torch.tensor([2])]
    cpu.gather_block_tables(idx, *tables, tensor([[1, 2, 2]]), 3, 2, BLOCK_SIZE=8)
    assert out.tolist() == [[POISON, POISON], [5, POISON], [0, 0]]

    input_ids, following = poisoned(5), poisoned(1, 3)
    tokens = tensor(np.arange(90).reshape(3, 30))
    state = [idx, query_start_loc, tokens, 30, prefill_len, computed]
    cpu.prepare_prefill_inputs(input_ids, following, 3, 1, *state, 8, 1)
    assert input_ids.tolist() == [POISON] * 3 + [2, 3]
    assert following.tolist() == [[0, POISON, POISON]]

    positions, seq_lens = poisoned(5, dtype=torch.int64), poisoned(3)
    cpu.prepare_pos_seq_lens(positions, seq_lens, idx, query_start_loc, computed, 3, 8)
    assert positions.tolist() == [0, 1, 2, 2, 3]
    assert seq_lens.tolist() == [3, 4, 0]

    input_ids, logits_indices = poisoned(5), poisoned(4, dtype=torch.int64)
    last, ones = tensor([[7], [7], [7]]), tensor(np.ones((3, 2)))
    state = [idx, last, query_start_loc, tensor([30, 4, 0]), ones[:, 0], ones, 2]
    cpu.combine_sampled_and_draft_tokens(
        input_ids, *state, tensor([0, 2, 4]), logits_indices, 2, 0
    )
    assert input_ids.tolist() == [POISON] * 3 + [1, 1]
    assert logits_indices.tolist() == [1, 2, 3, 4]

    cpu.post_update_num_computed_tokens(idx, computed, query_start_loc)
    assert computed.tolist() == [4, 9, 9]


def test_context_parallelism_is_refused():
    _, _, arguments, constants = compute_slot_mappings(np.random.default_rng(0))
    with pytest.raises(
        ValueError, match=r"context parallelism \(size 2\) is not supported"
    ):
        cpu.compute_slot_mappings(
            *map(pointers, arguments), **constants | {"CP_SIZE": 2}
        )


@pytest.mark.skipif(HAS_TRITON, reason="vLLM runs its own kernels")
def test_vllm_launches_the_installed_kernels():
    cpu.install()
    cpu.install()
    from vllm.v1.worker.gpu import input_batch

    assert [triton.next_power_of_2(n) for n in (1, 2, 33, 128)] == [1, 2, 64, 128]
    for name, kernel in cpu.KERNELS.items():
        module, attribute = name.rsplit(".", 1)
        assert getattr(importlib.import_module(module), attribute).func is kernel

    cu_num_logits = tensor([0, 2, 5])
    idx, local_pos = input_batch.expand_idx_mapping(
        torch.tensor([4, 2]), 5, cu_num_logits, 3
    )
    assert idx.tolist() == [4, 4, 2, 2, 2]
    assert local_pos.tolist() == [0, 1, 0, 1, 2]

    computed, last, total_len = tensor([1, 5]), poisoned(2, 1), tensor([3, 4])
    tokens, sampled = poisoned(2, 8), tensor([[30, 31, 0]])
    counts = [tensor([2]), tensor([1]), None]  # sampled, rejected, no query_start_loc
    state = [
        torch.tensor([1]),
        computed,
        last,
        None,
        sampled,
        *counts,
        tokens,
        total_len,
    ]
    input_batch.post_update(*state)
    assert computed.tolist() == [1, 4]
    assert last.tolist() == [[POISON], [31]]
    assert tokens[1].tolist() == [POISON] * 4 + [30, 31] + [POISON] * 2
    assert total_len.tolist() == [3, 6]


# At the end of the file: the interpreter imports while the tests above run.
@pytest.fixture(scope="module")
def oracle(interpreter: Any) -> dict[Any, tuple[list[str], list[Any]]]:
    """(case, seed) -> what Triton says: the kernel's argument names, its arguments afterwards."""
    keys = [(case, seed) for case in CASES for seed in SEEDS]
    launches = [case(np.random.default_rng(seed)) for case, seed in keys]
    results = interpreter.run([(NAMES[kernel], *rest) for kernel, *rest in launches])
    return dict(zip(keys, results, strict=True))


def parts(argument: Any) -> list[Any]:
    """The argument, or its tables, each tensor as all of its storage."""
    tensors = argument if isinstance(argument, tuple) else (argument,)
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    sizes = [t.untyped_storage().nbytes() // t.element_size() for t in tensors]
    return [t.as_strided((n,), (1,), 0) for t, n in zip(tensors, sizes, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernel_does_what_triton_does(case, seed, oracle):
    kernel, _, arguments, constants = case(np.random.default_rng(seed))
    names, expected = oracle[case, seed]
    assert [
        n for n in inspect.signature(kernel).parameters if n != "num_warps"
    ] == names
    kernel(*map(pointers, arguments), **constants)
    for name, got, want in zip(names, arguments, expected, strict=False):
        for got_part, want_part in zip(parts(got), parts(want), strict=True):
            # Sums of floats may be taken in another order.
            assert torch.allclose(got_part, want_part, 1e-6, 1e-6), (
                f"{name}: {got_part} is not {want_part}"
            )
