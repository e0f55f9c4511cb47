"""Add the options that several commands share to their parsers. Light imports only."""

import argparse
from typing import Any

from dllm_plugin.config.options import KV_CACHE_LAYOUTS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts an engine."""
    parser.add_argument(
        "--model", help="folder or hub name (default: the bundled model)"
    )
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="as in vLLM; on a CPU, the share of its memory",
    )
    add_decode_options(parser)


def add_decode_options(parser: Any) -> None:
    """Add the decode options that a command takes, to a parser or a group of one."""
    # `Options.from_user` checks them and names the known values.
    # Their names are known to code that imports torch, which `--help` does not wait for.
    parser.add_argument("--strategy", help="what a step computes (docs/strategies.md)")
    parser.add_argument(
        "--policy", help="which positions a step unmasks (docs/strategies.md)"
    )
    parser.add_argument(
        "--threshold", type=float, help="confidence that a position needs"
    )
    parser.add_argument("--block-length", type=int, help="positions of a block")
    parser.add_argument("--lora-path", help="D2F adapter to merge into the weights")
    parser.add_argument("--kv-cache-layout", help=", ".join(KV_CACHE_LAYOUTS))


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows vLLM's log."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show vLLM's log (default: a file, named when something fails)",
    )


def positive(text: str) -> int:
    """Return a whole number of at least 1. Raises ArgumentTypeError for smaller ones."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
