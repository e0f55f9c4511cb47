"""Parse the options of ``diffuplug bench``'s measuring modes. Light imports only."""

import argparse
import json
from collections.abc import Callable, Sequence
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
from dllm_plugin.commands.options import add_flags, add_model, flag_of

FIXED_WIDTHS = "2,4,8,16,32"
MAP_WIDTHS = "1,2,3,4,6,8,12,16,24,32"
MAP_CONTEXTS = "512,2048,8192,32768"
DECODE_OPTION = "as the decode option"


def add_modes(modes: Any) -> None:
    """Add a parser for each mode to the subparsers of ``diffuplug bench``."""
    for mode, text in MODES.items():
        parser = modes.add_parser(mode, help=text)
        _add_model(parser, mode)
        add = parser.add_argument
        _add_grid(add, mode)
        if mode in ("step", "all"):
            add("--context", type=int, help="default: 1024; of a checkpoint 256")
            add("--profile", action="store_true", help="where a step's time goes")
        if mode not in ("step", MAP):
            _add_served(add, mode)
        _add_engine(add, mode)
        if mode == ADAPTIVE:
            _add_adaptive(add)
        if mode == MAP:
            add("--contexts", default=MAP_CONTEXTS, help="tokens of each request")
            text = "to choose from, beside the canvas"
            add("--widths", default=MAP_WIDTHS, help=text)
            add("--acceptance", help="p0:lambda (default: 0.9:2.5)")
            add("--picture", type=Path, help="draw the map as a PNG")


def _add_model(parser: argparse.ArgumentParser, mode: str) -> None:
    add = parser.add_argument
    text = "dummy weights of these shapes"
    add("--shapes", choices=SHAPES, required=mode == WATCHED, help=text)
    if mode not in (WATCHED, MAP):
        add_model(parser)
        add("--threshold", type=float, help="with a checkpoint")
        add("--lora-path", help="D2F adapter of --model")
        add_flags(parser, ("allow_unverified",))
        baselines = f"baselines: {','.join(BASELINES)}"
        add("--vs", dest="versus", type=_names, default=(), help=baselines)
    strategies = ", ".join([*MEASURED, *(DRAFTS if mode == ADAPTIVE else ())])
    text = f"{strategies} (default: block_diffusion; with an adapter d2f)"
    add("--strategy", help=text)


def _add_grid(add: Callable[..., Any], mode: str) -> None:
    if mode != "latency":
        add("--requests", type=numbers, default=(1,), help="at once: 1,16,64")
    if mode not in ("latency", MAP):
        add("--max-positions", type=int, help="leave larger grid points out")
    text = "positions: 32,128 (default: 32, d2f 128, full attention 256)"
    add("--canvas", type=numbers, help=text)
    if mode != MAP:
        add("--block-length", type=int, help="default: 32, or half a canvas")
    if mode == WATCHED:
        add("--watched", type=numbers, default=(1,), help="of the requests: 1,16")


def _add_served(add: Callable[..., Any], mode: str) -> None:
    """Add the options of modes that serve whole requests."""
    add("--input-len", type=int, help="default: 512; with a checkpoint, none")
    add("--output-len", type=int, default=256)
    add("--rounds", type=int, default=3, help="requests after one another")
    add("--tokens-per-forward", type=float, help="with --shapes")
    if mode != WATCHED:
        text = f"rows beside the usual ones, {':'.join(REFRESHES)}: 8:32:32"
        add("--approximations", type=_names, default=(), help=text)


def _add_engine(add: Callable[..., Any], mode: str) -> None:
    """Add the options that an engine gets as they are."""
    add("--dtype", default="bfloat16", help="as in vLLM")
    add("--enforce-eager", action="store_true", help="as in vLLM")
    add("--gpu-memory-utilization", type=float, help="as in vLLM")
    add("--kv-cache-memory-bytes", type=int, help="as in vLLM")
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        add(name, type=int, default=1, help="as in vLLM")
    add("--attention-backend", help="as in vLLM")
    text = "as in vLLM, of plain vLLM too"
    form = f"; with --shapes also {W4A16}, stored so"
    add("--quantization", help=text + form)
    add("--kv-cache-dtype", help=text)
    add("--head-quantization", help=DECODE_OPTION)
    add("--compilation-config", type=_json, help="a JSON object, as in vLLM")
    for name in ("--compile-step", "--vocab-parallel"):
        add(name, action=argparse.BooleanOptionalAction, help=DECODE_OPTION)
    add("--commit-alone-from", type=int, help=DECODE_OPTION)
    add("--kv-cache-layout", help=DECODE_OPTION)
    if mode != MAP:
        text = f"{DECODE_OPTION}, under full attention"
        for name in REFRESHES:
            add(flag_of(name), type=int, help=text)
    add("--seed", type=int, default=0)


def _add_adaptive(add: Callable[..., Any]) -> None:
    add("--adaptive", default="throughput", help=f"{DECODE_OPTION}; off: blocks")
    add("--min-window", type=int, help=DECODE_OPTION)
    text = f"fixed widths too, or none (default: {FIXED_WIDTHS})"
    add("--widths", help=text)
    text = "with --shapes, p0:lambda (default: 0.9:2.5), or tokens a round: 2,4,6"
    add("--acceptance", help=text)
    text = "of drafts: where a step's time goes"
    add("--profile", action="store_true", help=text)


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
