"""Launch a kernel as a warm-up does: run in the process of the interpreter."""

from torch import Tensor

from dllm_plugin.kernels.launch import compile_ahead
from dllm_plugin.kernels.move_rows import move_rows


def move_ahead(*arguments: Tensor) -> None:
    """Move rows inside of a warm-up: nothing moves."""
    with compile_ahead():
        move_rows(*arguments)


def move_behind(*arguments: Tensor) -> None:
    """Move rows when a warm-up has ended."""
    with compile_ahead():
        pass
    move_rows(*arguments)
