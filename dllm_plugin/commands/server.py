"""Run vLLM's server in this process, with one sentence for whatever keeps it from starting."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from transformers import CONFIG_MAPPING
from vllm import ModelRegistry
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_plugin.commands.interrupts import TERMINATED, end_now
from dllm_plugin.commands.models import architecture_of, read_config, why_unserved
from dllm_plugin.commands.options import flag_of
from dllm_plugin.config.options import OPTIONS
from dllm_plugin.config.validation import did_you_mean

MIDDLEWARE = "dllm_plugin.commands.ready.Lifecycle"
OF_DRAFTS = "SpecDecoding metrics"  # numbers that mean nothing here
UNRECOGNIZED = "unrecognized arguments: "
DRAIN_SECONDS = 10  # for running requests, once the server is asked to end


class ServerParser(FlexibleArgumentParser):
    """Parse the options of `vllm serve`; raise ValueError if one is wrong."""

    known: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        """Raise ValueError in place of printing vLLM's usage."""
        if not message.startswith(UNRECOGNIZED):
            raise ValueError(message)
        words = message.removeprefix(UNRECOGNIZED).split()
        word = words[0].partition("=")[0]
        if not word.startswith("-"):
            raise ValueError(
                f"{word} is one argument too many: the model comes first, or after --model"
            )
        known = (*ServerParser.known, *map(flag_of, OPTIONS))
        raise ValueError(f"there is no option {word}{did_you_mean(word, known)}")


def serve(arguments: Sequence[str], model: str | None = None) -> int:
    """Serve until somebody ends the server. Raises ValueError for wrong options.

    Args:
        model: whose architecture is checked; None if vLLM alone can read it.
    """
    # What the command `vllm` sets: the safest way to start processes.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = ServerParser(prog="diffuplug")
    command = ServeSubcommand()
    served = command.subparser_init(parser.add_subparsers(dest="subparser"))
    ServerParser.known = tuple(served._option_string_actions)
    served.set_defaults(shutdown_timeout=DRAIN_SECONDS)
    if not sys.stderr.isatty():
        served.set_defaults(use_tqdm_on_load=False)
    args = parser.parse_args(["serve", *arguments])
    if model is not None and not args.trust_remote_code:
        refuse_unknown(model)
    args.middleware = [MIDDLEWARE, *args.middleware]
    configure_logging_from_args(args)
    quieten()
    command.validate(args)
    try:
        command.cmd(args)
    except KeyboardInterrupt:  # what vLLM makes of SIGTERM while it starts
        end_now(TERMINATED)
    return 0


def refuse_unknown(model: str) -> None:
    """Raise ValueError for a model that DiffuPlug, vLLM, its plugins and transformers lack.

    vLLM would ask for trust in the checkpoint's own code.
    """
    load_general_plugins()
    config = read_config(model)
    known = architecture_of(config) in ModelRegistry.get_supported_archs()
    # Of other architectures vLLM can run what transformers has.
    if not known and config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{why_unserved(model, config)}; vLLM does not serve it either"
        )


def quieten() -> None:
    """Print what DiffuPlug logs in place of what vLLM and uvicorn repeat."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("diffuplug: %(message)s"))
    logger = logging.getLogger("diffuplug")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if os.environ.get("VLLM_LOGGING_LEVEL") == "WARNING":
        uvicorn = logging.getLogger("uvicorn.error")
        uvicorn.addFilter(lambda record: record.levelno > logging.INFO)
    rates = logging.getLogger("vllm.v1.metrics.loggers")
    rates.addFilter(lambda record: not str(record.msg).startswith(OF_DRAFTS))
