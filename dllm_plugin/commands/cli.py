"""Parse the command line of ``diffuplug`` and call the command's module. Light imports only."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import dllm_plugin
from dllm_plugin.commands import eval as eval_command
from dllm_plugin.commands import (
    generate,
    infill,
    interrupts,
    models,
    serve,
    watch,
)
from dllm_plugin.commands.installation import load_command
from dllm_plugin.commands.models import check_files
from dllm_plugin.commands.offline import (
    StartError,
    collecting_later,
    engine_options,
    one_sentence,
    spin_briefly,
)
from dllm_plugin.commands.options import (
    Parser,
    add_decode_options,
    add_model,
    positive,
)

FAILED, WRONG_OPTIONS = 1, 2
OFFLINE = ("generate", "infill", "eval", "watch")


def build_parser() -> Parser:
    """Build the parser of all commands and their options."""
    parser = Parser(prog="diffuplug", description="Diffusion language models on vLLM.")
    parser.add_argument("--version", action="version", version=dllm_plugin.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate.add_parser(commands)
    infill.add_parser(commands)
    serve.add_parser(commands)
    watch.add_parser(commands)
    eval_command.add_parser(commands)
    _add_doctor(commands)
    _add_verify(commands)
    parser_of_models = commands.add_parser("models", help="list public checkpoints")
    parser_of_models.add_argument("name", nargs="?", help="show one, such as sdar:8b")
    commands.add_parser("bench", help="measure this installation")
    commands.add_parser("report", help="write one file about a model on this machine")
    return parser


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="what is installed and what would be chosen"
    )
    add_model(parser)
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--requests", type=positive, help="say which width so many would get"
    )
    parser.add_argument(
        "--context", type=positive, help="tokens of each (default: 1024)"
    )
    parser.add_argument("--acceptance", help="docs/widths.md (default: 0.9:2.5)")
    parser.add_argument("--step-ms", type=float, help="time of a step of one request")
    parser.add_argument(
        "--adaptive", help="as the decode option: off, throughput or balanced"
    )
    parser.add_argument("--min-window", type=int, help="as the decode option")
    parser.add_argument("--max-window", type=int, help="as the decode option")
    parser.add_argument("--canvas-length", type=int, help="as the decode option")
    add_decode_options(parser)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare a checkpoint with a second implementation"
    )
    add_model(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", help="one prompt a line (default: five)"
    )
    parser.add_argument(
        "--limit", type=positive, help="number of prompts (default: all)"
    )
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--tensor-parallel-size", type=positive, default=1, help="as in vLLM"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="compare with the checkpoint's own code, if it has some",
    )
    add_decode_options(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a failure, or 2 for wrong options."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        dllm_plugin.check_installed_vllm()
        args = _parse(arguments)
        if argv is None:
            interrupts.end_at_signals()
        _prepare(args)
        status = _run(args)
        if argv is None and args.command in ("doctor", "eval"):
            _end_process(status)
        return status
    except KeyboardInterrupt:
        return interrupts.INTERRUPTED
    except BrokenPipeError as error:
        if not _output_is_cut():
            return _failed(error, FAILED)
        return 128 + signal.SIGPIPE
    except (ValueError, FileNotFoundError) as error:
        return _failed(error, WRONG_OPTIONS)
    except (ImportError, OSError, StartError) as error:
        return _failed(error, FAILED)


def _failed(error: Exception, status: int) -> int:
    print(f"diffuplug: error: {one_sentence(error)}", file=sys.stderr)
    return status


def _prepare(args: argparse.Namespace) -> None:
    """Set what vLLM reads in the environment: where it logs, and how much."""
    if args.command == "serve":
        return
    # Standard output is for results. vLLM logs there, at INFO, unless told otherwise.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if args.command not in OFFLINE:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    elif args.model is None:  # these show phases in place of the log
        spin_briefly()


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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; print one sentence and exit with 2 if it is wrong."""
    command, rest = arguments[:1], arguments[1:]
    if command in (["bench"], ["report"]):  # whose package parses what follows
        return argparse.Namespace(command=command[0], arguments=rest)
    if command == ["serve"] and not {"-h", "--help"} & set(rest):
        return argparse.Namespace(command="serve", arguments=rest)
    args = build_parser().parse(arguments, "command")
    # With --url the name is the server's own.
    if getattr(args, "model", None) and getattr(args, "url", None) is None:
        args.model = models.resolve(args.model)
    return args


def _run(args: argparse.Namespace) -> int:
    if args.command == "models":
        return models.run(args.name)
    if args.command == "generate":
        return generate.run(args)
    if args.command == "infill":
        return infill.run(args)
    if args.command == "watch":
        return watch.run(args)
    if args.command == "eval":
        return eval_command.run(args)
    if args.command == "serve":
        return serve.run(args.arguments)
    if args.command in ("bench", "report"):
        words = f"diffuplug {args.command}"
        return load_command(args.command, words)(args.arguments)
    if args.command == "verify":
        engine_options(args)  # refuses wrong ones before vLLM is imported
        from dllm_plugin.commands.verify import command as verify_command

        return verify_command.run(args)
    options = engine_options(args, check_files)
    with collecting_later():
        from dllm_plugin.commands import doctor, forecast

        config = options["additional_config"]
        config["dllm"] = forecast.with_widths(args, config["dllm"])
        return doctor.run(options, forecast.read_load(args))


if __name__ == "__main__":
    sys.exit(main())
