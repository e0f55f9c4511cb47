"""Parse the options of ``diffuplug bench``'s measuring modes. Light imports only."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from diffuplug_bench.model_shapes import SHAPES
from diffuplug_bench.settings import (
    BASELINES,
    MAP,
    MODES,
    REFRESHES,
    WATCHED,
    Settings,
    check,
)
from diffuplug_bench.strategies import MEASURED, default_strategy
from dllm_plugin import default_model


def add_modes(modes: Any) -> None:
    """Add a parser for each mode to the subparsers of ``diffuplug bench``."""
    for mode, text in MODES.items():
        add_options(modes.add_parser(mode, help=text), mode)


def add_options(parser: argparse.ArgumentParser, mode: str) -> None:
    """Add the options of a mode to its parser."""
    model = parser.add_mutually_exclusive_group(required=mode == WATCHED)
    model.add_argument("--shapes", choices=SHAPES, help="dummy weights of these shapes")
    if mode == WATCHED:
        parser.add_argument(
            "--watched", type=numbers, default=(1,), help="of them: 1,16"
        )
    elif mode != MAP:
        model.add_argument(
            "--model", help="folder or hub name (default: the bundled model)"
        )
        parser.add_argument("--threshold", type=float, help="with a checkpoint")
        parser.add_argument("--lora-path", help="D2F adapter of --model")
        parser.add_argument(
            "--vs", type=_names, default=(), help=f"baselines: {','.join(BASELINES)}"
        )
    parser.add_argument(
        "--strategy",
        help=f"{', '.join(MEASURED)} (default: block_diffusion; with an adapter d2f)",
    )
    if mode != "latency":
        parser.add_argument(
            "--requests", type=numbers, default=(1,), help="at once: 1,16,64"
        )
        if mode != MAP:
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
    if mode in ("step", "all"):
        parser.add_argument(
            "--context", type=int, help="default: 1024; of a checkpoint 256"
        )
        parser.add_argument(
            "--profile", action="store_true", help="where a step's time goes"
        )
    if mode not in ("step", MAP):
        _add_served(parser, mode)
    parser.add_argument("--dtype", default="bfloat16", help="as in vLLM")
    parser.add_argument("--enforce-eager", action="store_true", help="as in vLLM")
    for name, kind in (
        ("gpu-memory-utilization", float),
        ("kv-cache-memory-bytes", int),
    ):
        parser.add_argument(f"--{name}", type=kind, help="as in vLLM")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="as in vLLM"
    )
    parser.add_argument("--attention-backend", help="as in vLLM")
    parser.add_argument(
        "--compilation-config", type=_json, help="a JSON object, as in vLLM"
    )
    parser.add_argument(
        "--compile-step",
        action=argparse.BooleanOptionalAction,
        help="as the decode option",
    )
    parser.add_argument(
        "--vocab-parallel",
        action=argparse.BooleanOptionalAction,
        help="as the decode option",
    )
    parser.add_argument("--commit-alone-from", type=int, help="as the decode option")
    parser.add_argument("--kv-cache-layout", help="as the decode option")
    for name in REFRESHES if mode != MAP else ():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=int, help="as the decode option, under full attention"
        )
    parser.add_argument("--seed", type=int, default=0)


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
    if mode in ("throughput", "latency", "all"):
        parser.add_argument(
            "--approximations",
            type=_names,
            default=(),
            help=f"rows beside the usual ones, {':'.join(REFRESHES)}: 8:32:32",
        )


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(dict.fromkeys(kind(item) for item in text.split(",")))


def numbers(text: str) -> tuple[int, ...]:
    """Return numbers written as in ``1,16,64``, in order, each once."""
    return tuple(sorted(_list_of(int)(text)))


def _names(text: str) -> tuple[str, ...]:
    return _list_of(str.strip)(text)


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the settings of parsed options; import nothing heavy.

    Raises ValueError with one sentence for options that do not fit together.
    """
    given = vars(args)
    is_dummy, model = args.shapes is not None, given.get("model")
    own_lora = lora = given.get("lora_path")
    if not is_dummy and model is None and lora is None:
        lora = default_model.adapter_path()
    strategy = args.strategy or default_strategy(bool(lora) and not is_dummy)
    measured = MEASURED.get(strategy)
    if measured is None:
        raise ValueError(
            f"--strategy {strategy} is unknown: use {', '.join(MEASURED)}."
        )
    settings = Settings(
        mode=args.mode,
        shapes=args.shapes,
        model=model,
        strategy=strategy,
        requests=given.get("requests", (1,)),
        canvas=args.canvas or measured.canvas,
        max_positions=given.get("max_positions"),
        block_length=given.get("block_length"),
        threshold=given.get("threshold"),
        lora_path=lora if measured.by_confidence else own_lora,
        context=_or(given.get("context"), 1024 if is_dummy else 256),
        input_len=_or(given.get("input_len"), 512),
        output_len=given.get("output_len", 0),
        rounds=given.get("rounds", 0),
        tokens_per_forward=given.get("tokens_per_forward"),
        watched=given.get("watched", ()),
        versus=given.get("vs", ()),
        profile=given.get("profile", False),
        dtype=args.dtype,
        enforce_eager=args.enforce_eager,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        tensor_parallel_size=args.tensor_parallel_size,
        attention_backend=args.attention_backend,
        compilation_config=args.compilation_config,
        compile_step=args.compile_step,
        vocab_parallel=args.vocab_parallel,
        commit_alone_from=args.commit_alone_from,
        kv_cache_layout=args.kv_cache_layout,
        full_refresh_every=given.get("full_refresh_every"),
        refresh_before=given.get("refresh_before"),
        suffix_window=given.get("suffix_window"),
        approximations=given.get("approximations", ()),
        seed=args.seed,
    )
    check(settings, given.get("input_len"))
    return settings
