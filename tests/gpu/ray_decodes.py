"""Recorded decodes on the two nodes of a Ray cluster; started by `test_hosts.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import recorded  # noqa: E402

if __name__ == "__main__":
    recorded.check_d2f(
        "d2f_llada",
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        enforce_eager=True,
        disable_custom_all_reduce=True,
    )
