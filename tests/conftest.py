"""For all tests."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Importing torch's compiler warns about torch's own use of torch.jit.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit:DeprecationWarning")
