"""Run Triton kernels, vLLM's or ours, on the CPU, in a process that is asked by its standard input.

A line `LAUNCHES RESULTS` names two files. LAUNCHES is a saved list of (kernel name, grid,
arguments, constants); a tuple among the arguments stands for an array of pointers to its tensors;
without a grid the name is that of a function which launches kernels by itself. RESULTS will hold,
for each launch, the argument names and the arguments after the run, or what a function returns, if
anything. New tensors are filled with NaN. The answer is a line. This needs a process of its own:
Triton decides at import whether to interpret, and vLLM whether there is a Triton.
"""

import importlib
import inspect
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class HostDriver(DriverBase):
    """The least that lets vLLM find a CPU backend; the interpreter compiles nothing."""

    def __init__(self) -> None: ...

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


class NoCompiler:
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return False  # torch's compiler asks every backend


def round_as_gpus_do() -> None:
    """Round float32 to bfloat16 and float8 to nearest, ties to even, as GPUs do.

    The interpreter truncates bfloat16 and small float8, and rounds ties of float8 up.
    """
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    torch_types = {
        interpreter.tl.bfloat16: (torch.bfloat16, torch.uint16),
        interpreter.tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }

    def converted(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given != interpreter.tl.float32 or wanted not in torch_types:
            return convert(values, given, wanted, rounding)
        rounded, bits = torch_types[wanted]
        return torch.from_numpy(values.copy()).to(rounded).view(bits).numpy()

    interpreter._convert_float = converted


def pointers(argument: Any) -> Any:
    """The argument as the kernel takes it: a tuple of tensors becomes their addresses."""
    if not isinstance(argument, tuple):
        return argument
    return torch.tensor([tensor.data_ptr() for tensor in argument], dtype=torch.uint64)


def run(launches: str, results: str) -> None:
    done: list[Any] = []
    for name, grid, arguments, constants in torch.load(launches, weights_only=False):
        module, attribute = name.rsplit(".", 1)
        kernel = getattr(importlib.import_module(module), attribute)
        if grid is None:
            returned = kernel(*arguments, **constants)
            names = list(inspect.signature(kernel).parameters)
            done.append((names, arguments) if returned is None else returned)
            continue
        kernel[grid](*map(pointers, arguments), **constants)
        done.append((list(kernel.arg_names), arguments))
    torch.save(done, results)


def main() -> None:
    backends["cpu"] = Backend(compiler=NoCompiler, driver=HostDriver)
    round_as_gpus_do()
    torch.use_deterministic_algorithms(True)
    import vllm.v1.worker.gpu.block_table  # noqa: F401  # while tests are collected

    for line in sys.stdin:
        run(*line.split())
        print(flush=True)


if __name__ == "__main__":
    main()
