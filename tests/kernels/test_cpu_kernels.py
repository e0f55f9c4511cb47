"""The CPU kernels against vLLM's own Triton kernels, run by Triton's interpreter.

Every tensor argument is compared over its whole storage, so what must stay untouched counts too.
"""

import importlib
import importlib.util
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from cpu_launches import CASES, POISON, compute_slot_mappings, poisoned, tensor
from torch import Tensor
from vllm.triton_utils import HAS_TRITON, triton

from dllm_plugin.kernels import runner as cpu

NAMES = {kernel: name for name, kernel in cpu.KERNELS.items()}
SEEDS = range(5)


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
