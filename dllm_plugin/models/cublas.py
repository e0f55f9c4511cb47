"""cuBLAS without a workspace, where that is faster.

With one, cuBLAS splits the inner axis of products of few rows among more of the GPU, and needs a
second kernel to add up the parts. On an H200 the products of a layer take 3 % less time without at
32 rows, and as long at 128 and more (benchmarks/reports/h200_steps.md).
"""

import os

import torch

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # read by torch at a process's first product
FASTER_ON = ((9, 0),)  # compute capabilities: of the H200, where it was measured, and the H100


def forgo_workspace(capability: tuple[int, int] | None = None) -> None:
    """Set the process up, before its first product; what a user has set stays.

    Args:
        capability: of the GPU; default: the current one's, if there is any.
    """
    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if capability in FASTER_ON:
        os.environ.setdefault(VARIABLE, ":0:0")
