"""Parse the command line of ``diffuplug`` and call the command's module. No heavy imports."""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import dllm_plugin

from . import generate, infill, interrupts, models, serve, watch
from .installation import load_command
from .models import check_files
from .offline import collecting_later, engine_options, one_sentence, spin_briefly
from .options import (
    Parser,
    add_count,
    add_decode_options,
    add_dtype,
    add_engine_options,
    add_flags,
    add_model,
    add_switch,
    add_value,
)
from .verify import PROMPTS, read_prompts

LEVEL = "VLLM_LOGGING_LEVEL"
FAILED, WRONG_OPTIONS = 1, 2
OVERVIEW = """Diffusion language models on vLLM.

serve:
  serve     serve a model over HTTP; without a model, the bundled one
  models    list public checkpoints

ask without a server:
  generate  answer one prompt, offline
  infill    fill the gaps of a text, offline
  watch     show which positions each forward decides

check:
  doctor    print what is installed, what would be chosen, and what fits
  verify    compare a checkpoint with a second implementation
  report    write one file about a model on this machine

measure:
  eval      score the bundled model on unseen problems
  bench     measure this installation

`diffuplug COMMAND --help` lists the options of a command."""
ENDED = ("doctor", "eval", "serve")
OFFLINE = ("generate", "infill", "eval", "watch")
# Entry points of commands whose package parses what follows.
EXTENSIONS = {"bench": "bench", "eval": "eval_tables", "report": "report"}


def build_parser() -> Parser:
    """Build the parser of all commands and their options."""
    parser = Parser(
        prog="diffuplug",
        usage="diffuplug COMMAND ...",
        description=OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=dllm_plugin.__version__)
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        prog="diffuplug",
        help=argparse.SUPPRESS,
    )
    generate.add_parser(commands)
    infill.add_parser(commands)
    serve.add_parser(commands)
    watch.add_parser(commands)
    _add_doctor(commands)
    _add_verify(commands)
    parser_of_models = commands.add_parser("models")
    parser_of_models.add_argument("name", nargs="?", help="show one, such as sdar:8b")
    parser_of_models.set_defaults(run=lambda args: models.run(args.name))
    for name in EXTENSIONS:
        commands.add_parser(name)
    return parser


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor")
    add_model(parser)
    add_dtype(parser)
    memory = parser.add_argument_group("memory", "What `fits` is computed for.")
    add_count(memory, "--max-model-len", "tokens of a request")
    words = "such as fp8_per_channel (default: none)"
    add_value(memory, "--quantization", "Q", words)
    add_count(memory, "--tensor-parallel-size", "number of GPUs")
    widths = parser.add_argument_group(
        "widths by load", "Which width a load would get (docs/widths.md)."
    )
    add_count(widths, "--requests", "requests at once")
    add_count(widths, "--context", "tokens of each (default: 1024)")
    words = "of tokens that a wide step decides (default: 0.9:2.5)"
    add_value(widths, "--acceptance", "P0:LAMBDA", words)
    words = "time of a step of one request"
    add_value(widths, "--step-ms", "MS", words, type=float)
    add_flags(widths, ("adaptive", "min_window", "max_window", "canvas_length"))
    add_decode_options(parser)
    parser.set_defaults(run=_run_doctor)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser("verify")
    add_model(parser)
    add_value(parser, "--prompts", "FILE", "one prompt a line (default: five)")
    add_count(parser, "--limit", "number of prompts (default: all)")
    gpus = "number of GPUs (default: 1)"
    add_count(parser, "--tensor-parallel-size", gpus, default=1)
    words = "compare with the checkpoint's own code, if it has some"
    add_switch(parser, "--trust-remote-code", words)
    add_engine_options(parser)
    parser.set_defaults(run=_run_verify)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a failure, or 2 for wrong options."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    ends = argv is None
    try:
        dllm_plugin.check_installed_vllm()
        args = _parse(arguments)
        if ends:
            interrupts.end_at_signals()
        _prepare(args)
        status: int = args.run(args)
        if ends and args.command in ENDED:
            # To free module by module what was imported would take a quarter of `doctor`'s time,
            # and Triton's would print what it leaks.
            sys.stdout.flush()
            os._exit(status)
        return status
    except KeyboardInterrupt:
        return interrupts.INTERRUPTED
    except BrokenPipeError as error:
        if not _output_is_cut():
            return _failed(error, FAILED, ends)
        return 128 + signal.SIGPIPE
    except (ValueError, FileNotFoundError) as error:
        return _failed(error, WRONG_OPTIONS, ends)
    except (ImportError, OSError, interrupts.StartError) as error:
        return _failed(error, FAILED, ends)
    except _vllm_refusals() as error:
        return _failed(error, WRONG_OPTIONS, ends)


def _vllm_refusals() -> tuple[type[Exception], ...]:
    """Return the error by which vLLM refuses parameters, if vLLM was imported."""
    module = sys.modules.get("vllm.exceptions")
    return () if module is None else (module.VLLMValidationError,)


def _failed(error: Exception, status: int, ends: bool) -> int:
    """Print one sentence; if the process ends with it, end engines, too."""
    print(f"diffuplug: error: {one_sentence(error)}", file=sys.stderr)
    if ends and "vllm" in sys.modules:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        # Python would take them apart in seconds, and print 40 lines about what leaked.
        interrupts.end_now(status)
    return status


def _prepare(args: argparse.Namespace) -> None:
    """Set what vLLM reads in the environment: where it logs, and how much.

    Raises ValueError for a level of logging that does not exist.
    """
    level = os.environ.get(LEVEL, "INFO")
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ValueError(f"{LEVEL} {level!r} is none of {', '.join(known)}")
    if args.command == "serve":
        return
    # Standard output is for results. vLLM logs there, at INFO, unless told otherwise.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if args.command not in OFFLINE:
        os.environ.setdefault(LEVEL, "WARNING")
    elif getattr(args, "model", "") is None:  # these show phases in place of the log
        spin_briefly()


def _output_is_cut() -> bool:
    """Return whether nobody reads standard output; Python's last flush then goes nowhere."""
    from .phases import open_nowhere, reader_has_gone

    cut = reader_has_gone(1)
    if cut:
        open_nowhere(1)
    return cut


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; print one sentence and exit with 2 if it is wrong."""
    command, rest = arguments[:1], arguments[1:]
    if command and command[0] in EXTENSIONS:
        return argparse.Namespace(
            command=command[0], arguments=rest, run=_run_extension
        )
    if command == ["serve"] and not {"-h", "--help"} & set(rest):
        return argparse.Namespace(command="serve", run=lambda args: serve.run(rest))
    args = build_parser().parse(arguments, "command")
    # With --url the name is the server's own.
    model = getattr(args, "model", None)
    if model is not None and getattr(args, "url", None) is None:
        args.model = models.resolve(model)
    return args


def _run_verify(args: argparse.Namespace) -> int:
    options = engine_options(args)
    texts = read_prompts(args.prompts or PROMPTS)[: args.limit]
    from .verify import command  # imports vLLM

    return command.run(args, options, texts)


def _run_doctor(args: argparse.Namespace) -> int:
    options = engine_options(args, check_files)
    from . import forecast

    config = options["additional_config"]
    config["dllm"] = forecast.with_widths(args, config["dllm"])
    load = forecast.read_load(args)
    with collecting_later():
        from . import doctor

        return doctor.run(options, load)


def _run_extension(args: argparse.Namespace) -> int:
    command = load_command(EXTENSIONS[args.command], f"diffuplug {args.command}")
    return command(args.arguments)
