"""Run as a script by test_gemms.py: print the kernels of a GEMM in an engine's process.

Argument: whether to start the engine. The last line of output is a JSON list of names.
"""

import json
import sys

import torch
from recorded import start
from torch.nn.functional import linear


def main(has_engine: bool) -> None:
    """LLaDA-8B's down projection of 32 rows, which cuBLAS splits if it can."""
    if has_engine:
        engine = start("checkpoints/tiny-llada", {"strategy": "d2f"})
    make = {"device": "cuda", "dtype": torch.bfloat16}
    x, w = torch.ones(32, 12288, **make), torch.ones(4096, 12288, **make)
    linear(x, w)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as trace:
        linear(x, w)
        torch.cuda.synchronize()
    if has_engine:
        engine.llm_engine.engine_core.shutdown()
    kernels = [
        e.name
        for e in trace.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    print(json.dumps(kernels))


if __name__ == "__main__":
    main(sys.argv[1] == "engine")
