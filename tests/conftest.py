"""For all tests."""

import gc
from collections.abc import Generator

import pytest
import sums


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
