"""Add the options of ``diffuplug bench adaptive``. Light imports only."""

from typing import Any

from dllm_plugin.commands.bench.options import add_options

MODE = "adaptive"
LIKE = "throughput"  # the mode whose options and requests are shared


def add_mode(modes: Any) -> None:
    """Add the parser of the mode to the subparsers of ``diffuplug bench``."""
    parser = modes.add_parser(MODE, help="tokens per second by width, and by load")
    add_options(parser, LIKE)
    parser.add_argument("--adaptive", default="throughput", help="as the decode option")
    parser.add_argument("--min-window", type=int, help="as the decode option")
    parser.add_argument("--widths", default="2,4,8,16,32", help="fixed ones, beside those by load")
    parser.add_argument("--acceptance", help="with --shapes, p0:lambda (default: 0.9:2.5)")
