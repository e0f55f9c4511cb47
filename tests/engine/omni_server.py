"""Servers of the omni tests: any model, any options."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from forked import PYTHON
from processes import Server, free_port, ready

VLLM, DIFFUPLUG = "vllm.entrypoints.cli.main", "dllm_plugin.commands.cli"


@contextlib.contextmanager
def serving(
    model: Path, log: Path, *options: str, program: str = VLLM
) -> Iterator[Server]:
    """A server that is ready."""
    port = free_port()
    command = [PYTHON, "-m", program, "serve", str(model)]
    common = [
        f"--port={port}",
        "--host=127.0.0.1",
        "--enforce-eager",
        "--served-model-name=tiny",
    ]
    with ready([*command, *common, *options], port, log) as server:
        yield server
