"""Sequences of floating canvases: the Triton kernel against the plain-torch reference."""

from typing import Any

import torch
from floating_batches import a_batch

from dllm_plugin.kernels.floating import lay_out_reference

KERNEL = "dllm_plugin.kernels.floating.lay_out"


def test_kernel_writes_what_the_reference_writes(interpreter: Any) -> None:
    cases, launches = [], []
    for seed in range(60):
        batch = a_batch(seed)
        sizes = len(batch.start_loc), len(batch.keys)
        ours = [torch.full((size,), -1, dtype=torch.int32) for size in sizes]
        lay_out_reference(*batch.arguments, *ours)
        blank = [torch.full((size,), -1, dtype=torch.int32) for size in sizes]
        cases.append(ours)
        launches.append((KERNEL, None, [*batch.arguments, *blank], {}))
    for ours, (_, arguments) in zip(cases, interpreter.run(launches), strict=True):
        for mine, written in zip(ours, arguments[-2:], strict=True):
            torch.testing.assert_close(written, mine, atol=0, rtol=0)
