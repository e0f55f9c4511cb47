"""For all tests."""

import gc
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
import spread
import sums

# Bytecode is kept, also where the environment says no: tests start dozens of processes, each of
# which would compile thousands of files again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    # Importing torch's compiler warns about torch's own use of torch.jit.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit:DeprecationWarning")
    sums.register(config)
    config.add_cleanup(gc.unfreeze)  # extensions look for leaks when the process ends


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """To search the objects that imports leave behind took a quarter of the unit run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same order in every worker."""
    spread.sort(items)


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Any
) -> spread.LongestFirst | None:
    """Spread files by a rule of our own; other ways of `--dist` stay xdist's."""
    return (
        spread.LongestFirst(config, log) if config.option.dist == "loadfile" else None
    )
