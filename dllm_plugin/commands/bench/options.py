"""Options of the measuring modes, and what they may not be combined with. Light imports only."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dllm_plugin import default_model
from dllm_plugin.commands.bench import schedule
from dllm_plugin.commands.bench.shapes import SHAPES
from dllm_plugin.config.options import Options
from dllm_plugin.decoding.strategy_names import BLOCK_DIFFUSION, D2F

MODES = {
    "step": "time per denoising step beside the floor of its matrix products",
    "throughput": "tokens per second, all requests at once",
    "latency": "seconds per request, one request at a time",
    "all": "step, throughput and latency on the same engines",
}
BASELINES = ("ar", "hf")
STRATEGIES = (BLOCK_DIFFUSION, D2F)
D2F_BLOCK = 32
DEFAULT_CANVAS = {BLOCK_DIFFUSION: (32,), D2F: (128,)}


@dataclass(frozen=True)
class Settings:
    """One measurement; units are tokens unless said otherwise.

    mode               key of `MODES`
    shapes, model      dummy weights of a named shape, or a checkpoint; neither: the bundled model
    requests           running at once; every number is a grid point
    canvas             positions fed per request and step; every length is an engine
    max_positions      grid points that would feed more per step are left out
    context            of `step`: tokens before the canvas, in the middle of the measurement
    input_len          of the other modes, on dummy weights
    output_len         tokens that a request may generate
    rounds             of the other modes: requests that are answered one after another
    tokens_per_forward on dummy weights: fixed by the schedule of `low_confidence`
    versus             baselines
    attention_backend  of what is measured, not of the gate: some take no float32
    compilation_config vLLM's, of what is measured and, but for numbers of tokens, of the gate
    """

    mode: str
    shapes: str | None
    model: str | None
    strategy: str
    requests: tuple[int, ...]
    canvas: tuple[int, ...]
    max_positions: int | None
    block_length: int | None
    threshold: float | None
    lora_path: str | None
    context: int
    input_len: int
    output_len: int
    rounds: int
    tokens_per_forward: float | None
    versus: tuple[str, ...]
    profile: bool
    dtype: str
    enforce_eager: bool
    gpu_memory_utilization: float | None
    tensor_parallel_size: int
    attention_backend: str | None
    compilation_config: dict[str, Any] | None
    compile_step: bool | None
    vocab_parallel: bool | None
    commit_alone_from: int | None
    kv_cache_layout: str | None
    seed: int

    def block(self, canvas: int) -> int:
        """Positions of a block: D2F's, or half a canvas, so that a commit can ride along."""
        if self.block_length is not None:
            return self.block_length
        return min(D2F_BLOCK, canvas) if self.strategy == D2F else canvas // 2

    def dllm(self, canvas: int) -> dict[str, Any]:
        """Decode options of an engine."""
        scheduled = self.strategy == BLOCK_DIFFUSION and (self.shapes or self.mode == "step")
        options = {
            "strategy": self.strategy,
            # What the requests of a fixed schedule ask for: it is this policy that is compiled.
            "policy": "low_confidence" if scheduled else None,
            "canvas_length": canvas,
            "block_length": self.block(canvas),
            "threshold": self.threshold,
            "lora_path": self.lora_path,
        }
        return {k: v for k, v in options.items() if v is not None} | self.switches

    @property
    def switches(self) -> dict[str, Any]:
        """Decode options that change how a step is computed, and no token."""
        given = {
            "compile_step": self.compile_step,
            "vocab_parallel": self.vocab_parallel,
            "commit_alone_from": self.commit_alone_from,
            "kv_cache_layout": self.kv_cache_layout,
        }
        return {name: value for name, value in given.items() if value is not None}

    def fed(self, canvas: int, requests: int, alone_from: int) -> int:
        """Positions of a step of so many requests that all denoise.

        `alone_from`: what the engine made of `commit_alone_from`.
        """
        alone = 0 < alone_from <= requests
        return requests * (self.block(canvas) if alone else canvas)

    def feeds_ahead(self, canvas: int) -> bool:
        """Whether the engine may feed blocks alone, or with masks behind them."""
        return self.strategy == BLOCK_DIFFUSION and canvas > self.block(canvas)

    def at_once(self, canvas: int) -> tuple[int, ...]:
        """Numbers of requests that are measured with a canvas."""
        most = self.max_positions
        return tuple(n for n in self.requests if most is None or n * canvas <= most)

    def served_at_once(self, canvas: int) -> tuple[int, ...]:
        """Numbers of requests at once in the modes that serve whole requests."""
        several = self.at_once(canvas) if "throughput" in self.served else ()
        return tuple(sorted({*several, *((1,) if "latency" in self.served else ())}))

    @property
    def steps(self) -> bool:
        """Whether single steps are measured."""
        return self.mode in ("step", "all")

    @property
    def served(self) -> tuple[str, ...]:
        """Modes that serve whole requests."""
        return tuple(m for m in ("throughput", "latency") if self.mode in (m, "all"))


def add_modes(modes: Any) -> None:
    """Add a parser per mode to the subparsers of ``diffuplug bench``."""
    for mode, text in MODES.items():
        _add_options(modes.add_parser(mode, help=text), mode)


def _add_options(parser: argparse.ArgumentParser, mode: str) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", choices=SHAPES, help="dummy weights of these shapes")
    what.add_argument("--model", help="folder or hub name (default: the bundled model)")
    parser.add_argument(
        "--strategy", help=f"{' or '.join(STRATEGIES)} (default: d2f with an adapter)"
    )
    one = () if mode == "latency" else (1,)
    if one:
        parser.add_argument("--requests", type=_numbers, default=one, help="at once: 1,16,64")
        parser.add_argument("--max-positions", type=int, help="leave larger grid points out")
    parser.add_argument("--canvas", type=_numbers, help="positions: 32,128 (default: 32, d2f: 128)")
    parser.add_argument("--block-length", type=int)
    parser.add_argument("--threshold", type=float, help="with a checkpoint")
    parser.add_argument("--lora-path", help="D2F adapter of --model")
    if mode in ("step", "all"):
        parser.add_argument("--context", type=int, help="default: 1024; of a checkpoint 256")
        parser.add_argument("--profile", action="store_true", help="where a step's time goes")
    if mode != "step":
        parser.add_argument("--input-len", type=int, help="default: 512; with a checkpoint, none")
        parser.add_argument("--output-len", type=int, default=256)
        parser.add_argument("--rounds", type=int, default=3, help="requests after one another")
        parser.add_argument("--tokens-per-forward", type=float, help="with --shapes")
    parser.add_argument("--vs", type=_names, default=(), help=f"baselines: {','.join(BASELINES)}")
    parser.add_argument("--dtype", default="bfloat16", help="as in vLLM")
    parser.add_argument("--enforce-eager", action="store_true", help="as in vLLM")
    parser.add_argument("--gpu-memory-utilization", type=float, help="as in vLLM")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="as in vLLM")
    parser.add_argument("--attention-backend", help="as in vLLM")
    parser.add_argument("--compilation-config", type=_json, help="a JSON object, as in vLLM")
    parser.add_argument(
        "--compile-step", action=argparse.BooleanOptionalAction, help="as the decode option"
    )
    parser.add_argument(
        "--vocab-parallel", action=argparse.BooleanOptionalAction, help="as the decode option"
    )
    parser.add_argument("--commit-alone-from", type=int, help="as the decode option")
    parser.add_argument("--kv-cache-layout", help="as the decode option")
    parser.add_argument("--seed", type=int, default=0)


def _list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(dict.fromkeys(kind(part) for part in text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(_list(int)(text)))


def _names(text: str) -> tuple[str, ...]:
    return _list(str.strip)(text)


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
    """The settings of parsed options. Raises ValueError with one sentence for what means nothing.

    Nothing heavy is imported before all that can be refused is refused.
    """
    given = vars(args)
    is_dummy, is_bundled = args.shapes is not None, args.shapes is None and args.model is None
    lora = default_model.adapter_path() if is_bundled and args.lora_path is None else args.lora_path
    strategy = args.strategy or (D2F if lora and not is_dummy else BLOCK_DIFFUSION)
    if strategy not in STRATEGIES:
        raise ValueError(
            f"--strategy {strategy} is not measured, as neither gate nor floor knows its passes: "
            f"use {' or '.join(STRATEGIES)}."
        )
    settings = Settings(
        mode=args.mode,
        shapes=args.shapes,
        model=args.model,
        strategy=strategy,
        requests=given.get("requests", (1,)),
        canvas=args.canvas or DEFAULT_CANVAS[strategy],
        max_positions=given.get("max_positions"),
        block_length=args.block_length,
        threshold=args.threshold,
        lora_path=lora if strategy == D2F else args.lora_path,
        context=_or(given.get("context"), 1024 if is_dummy else 256),
        input_len=_or(given.get("input_len"), 512),
        output_len=given.get("output_len", 0),
        rounds=given.get("rounds", 0),
        tokens_per_forward=given.get("tokens_per_forward"),
        versus=args.vs,
        profile=given.get("profile", False),
        dtype=args.dtype,
        enforce_eager=args.enforce_eager,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
        attention_backend=args.attention_backend,
        compilation_config=args.compilation_config,
        compile_step=args.compile_step,
        vocab_parallel=args.vocab_parallel,
        commit_alone_from=args.commit_alone_from,
        kv_cache_layout=args.kv_cache_layout,
        seed=args.seed,
    )
    _check_numbers(settings)
    _check_meaning(settings, given.get("input_len"))
    for canvas in settings.canvas:
        Options.from_user(settings.dllm(canvas))
    return settings


def _check_numbers(settings: Settings) -> None:
    for name in ("requests", "canvas"):
        if min(getattr(settings, name)) < 1:
            raise ValueError(f"--{name} must be whole numbers of at least 1.")
    names = ["tensor_parallel_size"] + (["context"] if settings.steps else [])
    names += ["input_len", "output_len", "rounds"] if settings.served else []
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1.")
    unknown = [name for name in settings.versus if name not in BASELINES]
    if unknown:
        raise ValueError(f"--vs {unknown[0]} is unknown; baselines: {', '.join(BASELINES)}.")
    for canvas in settings.canvas:
        if not settings.at_once(canvas):
            raise ValueError(
                f"--max-positions {settings.max_positions} leaves nothing of canvas {canvas} to "
                "measure: raise it."
            )
        block = settings.block(canvas)
        if block < 1 or canvas % block:
            raise ValueError(f"--canvas {canvas} is no whole number of blocks of {block}.")


def _check_meaning(settings: Settings, input_len: int | None) -> None:
    rate, is_dummy = settings.tokens_per_forward, settings.shapes is not None
    if settings.mode == "step" and settings.threshold is not None:
        raise ValueError(
            "--threshold changes nothing in the mode step, whose schedule is fixed: use the mode "
            "latency, throughput or all."
        )
    if is_dummy:
        if settings.threshold is not None or settings.lora_path is not None:
            raise ValueError(
                "--threshold and --lora-path mean nothing on dummy weights, whose confidences are "
                "noise: use --tokens-per-forward, or --model."
            )
        if settings.served and settings.strategy == D2F:
            raise ValueError(
                "--strategy d2f accepts by confidence, which dummy weights do not have: use "
                "block_diffusion with --tokens-per-forward, or --model."
            )
        if settings.served and rate is None:
            raise ValueError("--shapes needs --tokens-per-forward: dummy weights accept nothing.")
        smallest = min(settings.block(canvas) for canvas in settings.canvas)
        if rate is not None and not 1 <= rate <= smallest:
            raise ValueError(
                f"--tokens-per-forward {rate:g} must lie between 1 and a block of {smallest}."
            )
        if rate is not None:
            grid = [(settings.block(c), settings.served_at_once(c)) for c in settings.canvas]
            schedule.check(rate, settings.output_len, settings.rounds, grid)
    else:
        if rate is not None:
            raise ValueError("--tokens-per-forward is measured on a checkpoint: use --shapes.")
        if input_len is not None:
            raise ValueError("--input-len is what the prompts have on a checkpoint: use --shapes.")
        if settings.model is not None and "hf" in settings.versus:
            raise ValueError("--vs hf needs --shapes, or the bundled model: leave --model out.")
    alone = settings.commit_alone_from
    if alone and not all(map(settings.feeds_ahead, settings.canvas)):
        raise ValueError(
            f"--commit-alone-from {alone} needs the strategy block_diffusion and canvases of more "
            "than one block: leave it out."
        )
    if settings.compilation_config is not None and settings.enforce_eager:
        raise ValueError(
            "--compilation-config says how to compile, and --enforce-eager not to: leave one of "
            "them out."
        )
    if settings.mode == "step" and "hf" in settings.versus:
        raise ValueError("--vs hf serves whole requests: use the mode latency, throughput or all.")
