"""Add the options of ``diffuplug bench adaptive`` and ``map``. Light imports only."""

from pathlib import Path
from typing import Any

from diffuplug_bench.options import add_options
from diffuplug_bench.settings import MAP

MODE = "adaptive"
LIKE = "throughput"  # the mode whose options and requests are shared
FIXED = "2,4,8,16,32"
WIDTHS = "1,2,3,4,6,8,12,16,24,32"


def add_mode(modes: Any) -> None:
    """Add the parsers of both modes to the subparsers of ``diffuplug bench``."""
    parser = modes.add_parser(MODE, help="tokens per second by width, and by load")
    add_options(parser, LIKE)
    parser.add_argument(
        "--adaptive", default="throughput", help="as the decode option; off: blocks"
    )
    parser.add_argument("--min-window", type=int, help="as the decode option")
    parser.add_argument(
        "--widths", help=f"fixed ones beside those by load, or none (default: {FIXED})"
    )
    parser.add_argument(
        "--acceptance", help="with --shapes, p0:lambda (default: 0.9:2.5)"
    )
    parser = modes.add_parser(
        MAP, help="for which loads diffusion is faster than left to right"
    )
    add_options(parser, MAP)
    parser.add_argument(
        "--contexts", default="512,2048,8192,32768", help="tokens of each request"
    )
    parser.add_argument(
        "--widths", default=WIDTHS, help="to choose from, beside the canvas"
    )
    parser.add_argument("--acceptance", help="p0:lambda (default: 0.9:2.5)")
    parser.add_argument("--picture", type=Path, help="draw the map as a PNG")
