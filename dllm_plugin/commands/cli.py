"""Parse the command line of ``diffuplug`` and call the command's module. Light imports only."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import dllm_plugin
from diffuplug_bench import adaptive_options
from diffuplug_bench.options import add_modes, numbers, settings_of
from diffuplug_bench.settings import MODES, WATCHED
from dllm_plugin.commands import generate, infill, serve, watch
from dllm_plugin.commands.offline import (
    DECODE_OPTIONS,
    collecting_later,
    engine_options,
    one_sentence,
    spin_briefly,
)
from dllm_plugin.config.options import KV_CACHE_LAYOUTS

OFFLINE = ("generate", "infill", "eval", "watch")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their options."""
    parser = argparse.ArgumentParser(
        prog="diffuplug", description="Diffusion language models on vLLM."
    )
    parser.add_argument("--version", action="version", version=dllm_plugin.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_generate(commands)
    _add_infill(commands)
    commands.add_parser(
        "serve",
        help="vllm serve; without a model, the bundled one",
        usage="diffuplug serve [MODEL] [vllm serve options]",
        description="Passes everything to `vllm serve` (see `vllm serve --help`). Without MODEL "
        "it serves the bundled model with its D2F adapter under the name 'diffuplug'.",
    )

    _add_watch(commands)
    _add_eval(commands)
    doctor = commands.add_parser(
        "doctor", help="what is installed and what would be chosen"
    )
    doctor.add_argument(
        "model", nargs="?", help="folder or hub name (default: the bundled one)"
    )
    doctor.add_argument("--dtype", default="auto", help="as in vLLM")
    doctor.add_argument(
        "--requests", type=_positive, help="say which width so many would get"
    )
    doctor.add_argument(
        "--context", type=_positive, help="tokens of each (default: 1024)"
    )
    doctor.add_argument("--acceptance", help="docs/adaptive.md (default: 0.9:2.5)")
    doctor.add_argument("--step-ms", type=float, help="time of a step of one request")
    doctor.add_argument(
        "--adaptive", help="as the decode option: off, throughput or balanced"
    )
    doctor.add_argument("--min-window", type=int, help="as the decode option")
    doctor.add_argument("--max-window", type=int, help="as the decode option")
    doctor.add_argument("--canvas-length", type=int, help="as the decode option")
    _add_decode_options(doctor)
    _add_verify(commands)
    _add_bench(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="answer one prompt, offline")
    parser.add_argument("prompt", help="text, or - to read standard input")
    _add_model_options(parser)
    parser.add_argument(
        "--max-tokens", type=_positive, default=256, help="default: 256"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="as in vLLM")
    parser.add_argument("--seed", type=int, default=None)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--json-schema", metavar="FILE", help="answer in JSON that fits a schema"
    )
    shape.add_argument(
        "--regex", metavar="R", help="answer what a regular expression matches"
    )
    shape.add_argument("--choice", metavar="A,B", help="answer one of these words")
    _add_verbose(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="chat",
        action="store_true",
        default=None,
        help="apply the chat template",
    )
    form.add_argument(
        "--raw",
        dest="chat",
        action="store_false",
        help="do not apply the chat template (default: apply it if there is one)",
    )


def _add_infill(commands: Any) -> None:
    parser = commands.add_parser("infill", help="fill the gaps of a text, offline")
    lengths = "or several lengths to choose from: [MASK:2,4], [MASK:auto]"
    parser.add_argument("text", help=f'text with gaps: "{infill.EXAMPLE}", {lengths}')
    parser.add_argument(
        "--question", help="the text answers it, behind the chat template"
    )
    _add_model_options(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=None)
    _add_verbose(parser)


def _add_watch(commands: Any) -> None:
    parser = commands.add_parser(
        "watch", help="show which positions each forward decides"
    )
    parser.add_argument(
        "prompt", nargs="?", default=watch.EXAMPLE, help="default: a word problem"
    )
    parser.add_argument(
        "--url", help="a running `diffuplug serve` (default: an engine of its own)"
    )
    parser.add_argument("--api-key", help="of the server")
    _add_model_options(parser)
    parser.add_argument(
        "--max-tokens", type=_positive, default=128, help="default: 128"
    )
    _add_verbose(parser)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval", help="score the bundled model on unseen problems"
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        help="number of problems (default: 500, with --all 200)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every strategy and policy; writes decoding.md and .png",
    )
    parser.add_argument(
        "--refreshes",
        action="store_true",
        help="the part of --all about refreshes that cost less; writes refreshes.md",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="of --all and --refreshes (default: benchmarks/reports if there is one, else here)",
    )
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--json", action="store_true", help="ask for answers in JSON, held to a schema"
    )
    parser.add_argument(
        "--schedule",
        metavar="WIDTHS",
        help="score windows of these widths: 32,16,8,4,2",
    )
    _add_verbose(parser)
    scored = parser.add_argument_group("with --schedule alone")
    scored.add_argument(
        "--model", help="folder or hub name (default: the bundled model)"
    )
    scored.add_argument(
        "--questions", metavar="FILE", help="JSON lines with question and answer"
    )
    _add_decode_options(scored)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show vLLM's log (default: a file, named when something fails)",
    )


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare a checkpoint with a second implementation"
    )
    parser.add_argument(
        "model", nargs="?", help="folder or hub name (default: the bundled one)"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="one prompt a line (default: five)"
    )
    parser.add_argument(
        "--limit", type=_positive, help="number of prompts (default: all)"
    )
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--tensor-parallel-size", type=_positive, default=1, help="as in vLLM"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="compare with the checkpoint's own code, if it has some",
    )
    _add_decode_options(parser)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure this installation")
    modes = bench.add_subparsers(dest="mode", required=True, metavar="MODE")
    host = modes.add_parser(
        "host", help="time per denoising step outside the model forward"
    )
    _add_model_options(host)
    host.add_argument("--requests", type=numbers, default=(1, 64), help="at once: 1,64")
    host.add_argument("--max-tokens", type=_positive, default=128, help="default: 128")
    host.add_argument("--seed", type=int, default=0)
    add_modes(modes)
    adaptive_options.add_mode(modes)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="folder or hub name (default: the bundled model)"
    )
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="as in vLLM; on a CPU, the share of its memory",
    )
    _add_decode_options(parser)


def _add_decode_options(parser: Any) -> None:
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 1 for an error of the user's. Wrong options exit with 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        dllm_plugin.check_installed_vllm()
    except ImportError as error:
        print(f"diffuplug: error: {one_sentence(error)}", file=sys.stderr)
        return 1
    if arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments[1:2]):
        serve.run(arguments[1:])
    args = build_parser().parse_args(arguments)
    # Standard output is for results. vLLM logs there, at INFO, unless told otherwise.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if args.command in OFFLINE:  # they show phases in place of the log
        if args.model is None:
            spin_briefly()
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        status = _run(args, arguments)
        if argv is None and args.command in ("doctor", "eval"):
            _end_process(status)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError as error:
        if not _output_is_cut():
            print(f"diffuplug: error: {one_sentence(error)}", file=sys.stderr)
            return 1
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"diffuplug: error: {one_sentence(error)}", file=sys.stderr)
        return 1


def _end_process(status: int) -> NoReturn:
    """End a process whose engines have ended, without freeing module by module what it imported.

    That would take a quarter of the time of `doctor`.
    """
    sys.stdout.flush()
    os._exit(status)


def _output_is_cut() -> bool:
    """Return whether nobody reads standard output; Python's last flush then goes nowhere."""
    from dllm_plugin.commands.phases import reader_has_gone

    cut = reader_has_gone(1)
    if cut:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return cut


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if args.command == "generate":
        return generate.run(args)
    if args.command == "infill":
        return infill.run(args)
    if args.command == "watch":
        return watch.run(args)
    if args.command == "eval":
        return _run_eval(args)
    if args.command == "doctor":
        options = engine_options(args)
        with collecting_later():
            from dllm_plugin.commands import doctor, forecast

            config = options["additional_config"]
            config["dllm"] = forecast.with_widths(args, config["dllm"])
            return doctor.run(options, forecast.read_load(args))
    if args.command == "verify":
        from dllm_plugin.commands.verify import command as verify_command

        return verify_command.run(args)
    if args.mode == adaptive_options.MODE:
        from diffuplug_bench import adaptive

        return adaptive.run(args, arguments)
    if args.mode == adaptive_options.MAP:
        from diffuplug_bench import load_map

        return load_map.run(args, arguments)
    if args.mode in MODES:
        settings = settings_of(args)
        if args.mode == WATCHED:
            from diffuplug_bench import watched

            return watched.run(settings, arguments)
        from diffuplug_bench import command as bench_command

        return bench_command.run(settings, arguments)
    from diffuplug_bench import host

    if min(args.requests) < 1:
        raise ValueError(
            f"--requests must be whole numbers of at least 1, got {min(args.requests)}"
        )
    return host.run(
        engine_options(args), args.requests, args.max_tokens, args.seed, arguments
    )


def _run_eval(args: argparse.Namespace) -> int:
    from diffuplug_bench.eval import every_policy, refreshes, schedules
    from dllm_plugin.commands.eval import command as eval_command

    if args.refreshes and (args.all or args.json or args.schedule is not None):
        raise ValueError(
            "--refreshes is alone, or a part of --all: leave the other options out"
        )
    if args.json and (args.all or args.schedule is not None):
        raise ValueError(
            "--json is for the two ways of decoding: leave --all and --schedule out"
        )
    if args.output is not None and not (args.all or args.refreshes):
        raise ValueError("--output is where --all writes: add --all, or --refreshes")
    if args.schedule is not None:
        if args.all:
            raise ValueError(
                "--all has policies of its own: leave it or --schedule out"
            )
        widths = schedules.read_widths(args.schedule)
        questions = schedules.read_questions(args.questions, args.limit)
        return schedules.run(engine_options(args), widths, questions, args.verbose)
    for name in (*schedules.OPTIONS, *DECODE_OPTIONS):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --schedule")
    if args.all:
        return every_policy.run(args.limit, args.dtype, args.output, args.verbose)
    if args.refreshes:
        return refreshes.run(args.limit, args.dtype, args.output, args.verbose)
    return eval_command.run(args.limit, args.dtype, args.verbose, args.json)


if __name__ == "__main__":
    sys.exit(main())
