"""`vllm serve` for the omni tests: any model, any options."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from forked import PYTHON
from processes import Server, free_port, ready


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """A server that is ready."""
    port = free_port()
    program = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    common = [f"--port={port}", "--host=127.0.0.1", "--enforce-eager", "--served-model-name=tiny"]
    with ready([*program, *common, *options], port, log) as server:
        yield server
