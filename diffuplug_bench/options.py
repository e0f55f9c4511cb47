"""Parse the options of ``diffuplug bench``'s measuring modes. Light imports only."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from diffuplug_bench.checks import check
from diffuplug_bench.model_shapes import SHAPES, W4A16, canvas_of
from diffuplug_bench.settings import (
    ADAPTIVE,
    BASELINES,
    DRAFTS,
    MAP,
    MEASURED,
    MODES,
    REFRESHES,
    WATCHED,
    Settings,
    default_strategy,
)
from dllm_plugin import default_model
from dllm_plugin.commands.models import check_decoding, check_model
from dllm_plugin.commands.options import add_model

FIXED_WIDTHS = "2,4,8,16,32"
MAP_WIDTHS = "1,2,3,4,6,8,12,16,24,32"
MAP_CONTEXTS = "512,2048,8192,32768"
DECODE_OPTION = "as the decode option"


def add_modes(modes: Any) -> None:
    """Add a parser for each mode to the subparsers of ``diffuplug bench``."""
    for mode, text in MODES.items():
        parser = modes.add_parser(mode, help=text)
        _add_model(parser, mode)
        _add_grid(parser, mode)
        if mode in ("step", "all"):
            _add_step(parser)
        if mode not in ("step", MAP):
            _add_served(parser, mode)
        _add_engine(parser, mode)
        if mode == ADAPTIVE:
            _add_adaptive(parser)
        if mode == MAP:
            _add_map(parser)


def _add_model(parser: argparse.ArgumentParser, mode: str) -> None:
    parser.add_argument(
        "--shapes",
        choices=SHAPES,
        required=mode == WATCHED,
        help="dummy weights of these shapes",
    )
    if mode not in (WATCHED, MAP):
        add_model(parser)
        parser.add_argument("--threshold", type=float, help="with a checkpoint")
        parser.add_argument("--lora-path", help="D2F adapter of --model")
        baselines = f"baselines: {','.join(BASELINES)}"
        parser.add_argument(
            "--vs", dest="versus", type=_names, default=(), help=baselines
        )
    strategies = ", ".join([*MEASURED, *(DRAFTS if mode == ADAPTIVE else ())])
    parser.add_argument(
        "--strategy",
        help=f"{strategies} (default: block_diffusion; with an adapter d2f)",
    )


def _add_grid(parser: argparse.ArgumentParser, mode: str) -> None:
    if mode != "latency":
        parser.add_argument(
            "--requests", type=numbers, default=(1,), help="at once: 1,16,64"
        )
    if mode not in ("latency", MAP):
        parser.add_argument(
            "--max-positions", type=int, help="leave larger grid points out"
        )
    parser.add_argument(
        "--canvas",
        type=numbers,
        help="positions: 32,128 (default: 32, d2f 128, full attention 256)",
    )
    if mode != MAP:
        parser.add_argument(
            "--block-length", type=int, help="default: 32, or half a canvas"
        )
    if mode == WATCHED:
        parser.add_argument(
            "--watched", type=numbers, default=(1,), help="of the requests: 1,16"
        )


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context", type=int, help="default: 1024; of a checkpoint 256"
    )
    parser.add_argument(
        "--profile", action="store_true", help="where a step's time goes"
    )


def _add_served(parser: argparse.ArgumentParser, mode: str) -> None:
    """Add the options of modes that serve whole requests."""
    parser.add_argument(
        "--input-len", type=int, help="default: 512; with a checkpoint, none"
    )
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument(
        "--rounds", type=int, default=3, help="requests after one another"
    )
    parser.add_argument("--tokens-per-forward", type=float, help="with --shapes")
    if mode != WATCHED:
        parser.add_argument(
            "--approximations",
            type=_names,
            default=(),
            help=f"rows beside the usual ones, {':'.join(REFRESHES)}: 8:32:32",
        )


def _add_engine(parser: argparse.ArgumentParser, mode: str) -> None:
    """Add the options that an engine gets as they are."""
    parser.add_argument("--dtype", default="bfloat16", help="as in vLLM")
    parser.add_argument("--enforce-eager", action="store_true", help="as in vLLM")
    parser.add_argument("--gpu-memory-utilization", type=float, help="as in vLLM")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="as in vLLM")
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        parser.add_argument(name, type=int, default=1, help="as in vLLM")
    parser.add_argument("--attention-backend", help="as in vLLM")
    text = "as in vLLM, of plain vLLM too"
    form = f"; with --shapes also {W4A16}, stored so"
    parser.add_argument("--quantization", help=text + form)
    parser.add_argument("--kv-cache-dtype", help=text)
    parser.add_argument("--head-quantization", help=DECODE_OPTION)
    parser.add_argument(
        "--compilation-config", type=_json, help="a JSON object, as in vLLM"
    )
    for name in ("--compile-step", "--vocab-parallel"):
        parser.add_argument(
            name, action=argparse.BooleanOptionalAction, help=DECODE_OPTION
        )
    parser.add_argument("--commit-alone-from", type=int, help=DECODE_OPTION)
    parser.add_argument("--kv-cache-layout", help=DECODE_OPTION)
    if mode != MAP:
        for name in REFRESHES:
            option = f"--{name.replace('_', '-')}"
            text = f"{DECODE_OPTION}, under full attention"
            parser.add_argument(option, type=int, help=text)
    parser.add_argument("--seed", type=int, default=0)


def _add_adaptive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adaptive", default="throughput", help=f"{DECODE_OPTION}; off: blocks"
    )
    parser.add_argument("--min-window", type=int, help=DECODE_OPTION)
    parser.add_argument(
        "--widths", help=f"fixed widths too, or none (default: {FIXED_WIDTHS})"
    )
    parser.add_argument(
        "--acceptance",
        help="with --shapes, p0:lambda (default: 0.9:2.5), or tokens a round: 2,4,6",
    )
    parser.add_argument(
        "--profile", action="store_true", help="of drafts: where a step's time goes"
    )


def _add_map(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contexts", default=MAP_CONTEXTS, help="tokens of each request"
    )
    parser.add_argument(
        "--widths", default=MAP_WIDTHS, help="to choose from, beside the canvas"
    )
    parser.add_argument("--acceptance", help="p0:lambda (default: 0.9:2.5)")
    parser.add_argument("--picture", type=Path, help="draw the map as a PNG")


def numbers(text: str) -> tuple[int, ...]:
    """Return numbers written as in ``1,16,64``, in order, each once."""
    return tuple(sorted({int(word) for word in text.split(",")}))


def whole_numbers(text: str, refusal: str, most: int | None = None) -> list[int]:
    """Return numbers from 1 to `most`, written as in ``2,8``, in order, each once.

    Raises ValueError with `refusal` and the text.
    """
    found = set()
    for word in text.split(","):
        is_number = word.isdecimal() and int(word) >= 1
        if not is_number or (most is not None and int(word) > most):
            raise ValueError(f"{refusal}, got {text!r}")
        found.add(int(word))
    return sorted(found)


def one_canvas(canvas: Sequence[int], least: int = 0) -> int:
    """Return the only canvas length. Raises ValueError for several, or for a smaller one."""
    if len(canvas) == 1 and canvas[0] >= least:
        return canvas[0]
    limit = f" of at least {least} positions" if least else ""
    given = ",".join(map(str, canvas))
    raise ValueError(f"--canvas must be one length{limit}, got {given}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def settings_of(args: argparse.Namespace, **changed: Any) -> Settings:
    """Return the settings of parsed options, with some `changed`; import nothing heavy.

    Raises ValueError with one sentence for options that do not fit together.
    """
    given = vars(args) | changed
    is_dummy = args.shapes is not None
    model, lora = given.get("model"), given.get("lora_path")
    if is_dummy and model is not None:
        raise ValueError(
            f"--shapes {args.shapes} has weights of its own: leave the model {model} out"
        )
    adapter = lora
    if not is_dummy and model is None and lora is None:
        adapter = default_model.adapter_path()
    strategy = args.strategy or default_strategy(bool(adapter) and not is_dummy)
    if strategy not in MEASURED:
        raise ValueError(
            f"--strategy {strategy} is unknown: use {', '.join(MEASURED)}."
        )
    measured = MEASURED[strategy]
    needed = canvas_of(SHAPES[args.shapes]) if is_dummy else ()
    chosen: dict[str, Any] = {
        "strategy": strategy,
        "canvas": args.canvas or needed or measured.canvas,
        "lora_path": adapter if measured.by_confidence else lora,
    }
    if given.get("context") is None:
        chosen["context"] = 1024 if is_dummy else 256
    if given.get("input_len") is None:
        chosen["input_len"] = 512
    values = given | chosen
    names = [field.name for field in fields(Settings)]
    settings = Settings(**{name: values[name] for name in names if name in values})
    check(settings, given.get("input_len"))
    if model is not None:
        check_model(model)
        check_decoding(model, {"strategy": strategy})
    return settings
