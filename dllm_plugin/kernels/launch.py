"""Launch Triton kernels, or compile them before a request needs them."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from vllm import envs
from vllm.triton_utils import triton

_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel as ``kernel[grid](...)`` does; inside `compile_ahead`, only compile it."""
    kernel.run(*arguments, grid=grid, warmup=_compiles_only.get(), **options)


@contextlib.contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the kernels that the body launches, several at once.

    They do not run; what torch computes between them does, from memory that nobody wrote.
    """
    before = _compiles_only.set(True)
    threads = max(1, envs.VLLM_TRITON_JIT_WARMUP_NUM_THREADS)
    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _compiles_only.reset(before)
