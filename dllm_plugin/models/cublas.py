"""Take cuBLAS's workspace away on GPUs where GEMMs are faster without it.

With a workspace, cuBLAS splits the inner dimension of GEMMs with few rows (split-K) and adds up the
partial sums with a second kernel. On an H200 without a workspace, the GEMMs of a layer take 3 %
less time at 32 rows and as long at 128 and more (benchmarks/reports/h200_steps.md).

The setting belongs to the process: with `VLLM_ENABLE_V1_MULTIPROCESSING=0`, that is the user's own
process, and later engines in it have the same setting.
"""

import os

import torch

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # torch reads it at the first GEMM of a process
# Compute capability of the H200, where it was measured, and the H100.
FASTER_ON = ((9, 0),)


def forgo_workspace(capability: tuple[int, int] | None = None) -> None:
    """Disable the workspace before the first GEMM of this process, unless the user has set one.

    Args:
        capability: compute capability of the GPU; default: the current GPU's, if there is one.
    """
    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if capability in FASTER_ON:
        os.environ.setdefault(VARIABLE, ":0:0")
