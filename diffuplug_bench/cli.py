"""Parse the command line of ``diffuplug bench`` and run the mode. Light imports only."""

from collections.abc import Sequence

from diffuplug_bench.options import add_modes, numbers, settings_of
from diffuplug_bench.settings import ADAPTIVE, MAP, WATCHED
from dllm_plugin.commands.models import resolve
from dllm_plugin.commands.offline import engine_options
from dllm_plugin.commands.options import (
    Parser,
    add_engine_options,
    add_model,
    positive,
)


def build_parser() -> Parser:
    """Build the parser of all modes and their options."""
    parser = Parser(prog="diffuplug bench", description="Measure this installation.")
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    host = modes.add_parser(
        "host", help="time per denoising step outside the model forward"
    )
    add_model(host)
    add_engine_options(host)
    host.add_argument("--requests", type=numbers, default=(1, 64), help="at once: 1,64")
    host.add_argument("--max-tokens", type=positive, default=128, help="default: 128")
    host.add_argument("--seed", type=int, default=0)
    add_modes(modes)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the mode that the arguments after ``diffuplug bench`` name; return the exit status.

    Raises ValueError with one sentence for options that do not fit together.
    """
    args = build_parser().parse(arguments, "mode")
    if getattr(args, "model", None) is not None:
        args.model = resolve(args.model)
    command = ["bench", *arguments]
    if args.mode == "host":
        from diffuplug_bench import host

        if min(args.requests) < 1:
            raise ValueError(
                f"--requests must be whole numbers of at least 1, got {min(args.requests)}"
            )
        return host.run(
            engine_options(args), args.requests, args.max_tokens, args.seed, command
        )
    if args.mode == ADAPTIVE:
        from diffuplug_bench.adaptive import widths

        return widths.run(args, command)
    if args.mode == MAP:
        from diffuplug_bench.adaptive import load_map

        return load_map.run(args, command)
    settings = settings_of(args)
    if args.mode == WATCHED:
        from diffuplug_bench.serving import watched

        return watched.run(settings, command)
    from diffuplug_bench import command as steps_and_requests

    return steps_and_requests.run(settings, command)
