"""Parse and check the options of ``diffuplug bench``'s measuring modes. Light imports only."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dllm_plugin import default_model
from dllm_plugin.commands.bench import step_schedule
from dllm_plugin.commands.bench.model_shapes import SHAPES
from dllm_plugin.commands.bench.strategies import MEASURED, Measured, default_strategy
from dllm_plugin.config.options import Options

WATCHED = "watched"
MODES = {
    "step": "time per denoising step, against the lower bound of its GEMMs",
    "throughput": "tokens per second, all requests at once",
    "latency": "seconds per request, one request at a time",
    "all": "step, throughput and latency on the same engines",
    WATCHED: "tokens per second of a server while some requests stream their frames",
}
BASELINES = ("ar", "hf")


@dataclass(frozen=True)
class Settings:
    """Hold the settings of one measurement; units are tokens unless said otherwise.

    mode               key of `MODES`
    shapes, model      dummy weights of a named shape, or a checkpoint; neither: the bundled model
    requests           running at once; every number is a grid point
    canvas             positions computed per request and step; every length is an engine
    max_positions      grid points that would compute more per step are left out
    context            of mode step: tokens before the canvas, halfway through the measurement
    input_len          of the other modes, on dummy weights
    output_len         tokens that a request may generate
    rounds             of the other modes: requests that are answered one after another
    tokens_per_forward on dummy weights: fixed by the schedule of `low_confidence`
    watched            of mode watched: requests that stream frames; every number is a grid point
    versus             baselines
    attention_backend  of the measured engine, not of the gate's: some take no float32
    compilation_config vLLM's, for the measured engine and, without sizes, for the gate's
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
    watched: tuple[int, ...]
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
    full_refresh_every: int | None
    refresh_before: int | None
    suffix_window: int | None
    seed: int

    @property
    def measured(self) -> Measured:
        """How the strategy is measured."""
        return MEASURED[self.strategy]

    def block(self, canvas: int) -> int:
        """Return the block length: the strategy's longest, or half a canvas."""
        if self.block_length is not None:
            return self.block_length
        longest = self.measured.longest_block
        return canvas // 2 if longest is None else min(longest, canvas)

    def dllm(self, canvas: int) -> dict[str, Any]:
        """Return the decode options of an engine."""
        scheduled = not self.measured.by_confidence and (self.shapes or self.mode == "step")
        options = {
            "strategy": self.strategy,
            # Requests with a fixed schedule ask for this policy, so the engine compiles it.
            "policy": "low_confidence" if scheduled else None,
            "canvas_length": canvas,
            "block_length": self.block(canvas),
            "threshold": self.threshold,
            "lora_path": self.lora_path,
        }
        given = {k: v for k, v in options.items() if v is not None}
        return given | self.refreshes | self.switches

    @property
    def refreshes(self) -> dict[str, Any]:
        """Return the approximations of full attention that were asked for."""
        given = {
            "full_refresh_every": self.full_refresh_every,
            "refresh_before": self.refresh_before,
            "suffix_window": self.suffix_window,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def switches(self) -> dict[str, Any]:
        """Return the decode options that change how a step is computed but no token."""
        given = {
            "compile_step": self.compile_step,
            "vocab_parallel": self.vocab_parallel,
            "commit_alone_from": self.commit_alone_from,
            "kv_cache_layout": self.kv_cache_layout,
        }
        return {name: value for name, value in given.items() if value is not None}

    def positions_of_step(self, canvas: int, requests: int, single_block_from: int) -> int:
        """Return the positions that a step computes when so many requests denoise.

        Args:
            single_block_from: the option `commit_alone_from` as the engine resolved it.
        """
        single_block = 0 < single_block_from <= requests
        return requests * (self.block(canvas) if single_block else canvas)

    def computes_next_block(self, canvas: int) -> bool:
        """Return whether a step may compute the next block too, or one block of each request."""
        return self.measured.next_block and canvas > self.block(canvas)

    def grid_requests(self, canvas: int) -> tuple[int, ...]:
        """Return the numbers of requests that are measured with a canvas."""
        most = self.max_positions
        return tuple(n for n in self.requests if most is None or n * canvas <= most)

    def served_requests(self, canvas: int) -> tuple[int, ...]:
        """Return the numbers of requests at once in the modes that serve whole requests."""
        several = self.grid_requests(canvas) if "throughput" in self.request_modes else ()
        return tuple(sorted({*several, *((1,) if "latency" in self.request_modes else ())}))

    @property
    def measures_steps(self) -> bool:
        """Return whether single steps are measured."""
        return self.mode in ("step", "all")

    @property
    def request_modes(self) -> tuple[str, ...]:
        """Return the chosen modes that serve whole requests."""
        served = ("throughput", "latency")
        return served if self.mode == "all" else (self.mode,) * (self.mode in (*served, WATCHED))

    def steps_of_block(self, canvas: int) -> float:
        """Return the denoising steps that a block takes at `tokens_per_forward`."""
        assert self.tokens_per_forward is not None
        return self.block(canvas) / self.tokens_per_forward


def add_modes(modes: Any) -> None:
    """Add a parser for each mode to the subparsers of ``diffuplug bench``."""
    for mode, text in MODES.items():
        add_options(modes.add_parser(mode, help=text), mode)


def add_options(parser: argparse.ArgumentParser, mode: str) -> None:
    """Add the options of a mode to its parser."""
    model = parser.add_mutually_exclusive_group(required=mode == WATCHED)
    model.add_argument("--shapes", choices=SHAPES, help="dummy weights of these shapes")
    if mode == WATCHED:
        parser.add_argument("--watched", type=_numbers, default=(1,), help="of them: 1,16")
    else:
        model.add_argument("--model", help="folder or hub name (default: the bundled model)")
        parser.add_argument("--threshold", type=float, help="with a checkpoint")
        parser.add_argument("--lora-path", help="D2F adapter of --model")
        parser.add_argument(
            "--vs", type=_names, default=(), help=f"baselines: {','.join(BASELINES)}"
        )
    parser.add_argument(
        "--strategy",
        help=f"{', '.join(MEASURED)} (default: block_diffusion; with an adapter d2f)",
    )
    one = () if mode == "latency" else (1,)
    if one:
        parser.add_argument("--requests", type=_numbers, default=one, help="at once: 1,16,64")
        parser.add_argument("--max-positions", type=int, help="leave larger grid points out")
    parser.add_argument(
        "--canvas",
        type=_numbers,
        help="positions: 32,128 (default: 32, d2f 128, full attention 256)",
    )
    parser.add_argument("--block-length", type=int)
    if mode in ("step", "all"):
        parser.add_argument("--context", type=int, help="default: 1024; of a checkpoint 256")
        parser.add_argument("--profile", action="store_true", help="where a step's time goes")
    if mode != "step":
        parser.add_argument("--input-len", type=int, help="default: 512; with a checkpoint, none")
        parser.add_argument("--output-len", type=int, default=256)
        parser.add_argument("--rounds", type=int, default=3, help="requests after one another")
        parser.add_argument("--tokens-per-forward", type=float, help="with --shapes")
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
    for name in ("--full-refresh-every", "--refresh-before", "--suffix-window"):
        parser.add_argument(name, type=int, help="as the decode option, under full attention")
    parser.add_argument("--seed", type=int, default=0)


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(dict.fromkeys(kind(item) for item in text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
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
        raise ValueError(f"--strategy {strategy} is unknown: use {', '.join(MEASURED)}.")
    settings = Settings(
        mode=args.mode,
        shapes=args.shapes,
        model=model,
        strategy=strategy,
        requests=given.get("requests", (1,)),
        canvas=args.canvas or measured.canvas,
        max_positions=given.get("max_positions"),
        block_length=args.block_length,
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
        tensor_parallel_size=args.tensor_parallel_size,
        attention_backend=args.attention_backend,
        compilation_config=args.compilation_config,
        compile_step=args.compile_step,
        vocab_parallel=args.vocab_parallel,
        commit_alone_from=args.commit_alone_from,
        kv_cache_layout=args.kv_cache_layout,
        full_refresh_every=args.full_refresh_every,
        refresh_before=args.refresh_before,
        suffix_window=args.suffix_window,
        seed=args.seed,
    )
    _check_numbers(settings)
    _check_combinations(settings, given.get("input_len"))
    for canvas in settings.canvas:
        Options.from_user(settings.dllm(canvas))
    return settings


def _check_numbers(settings: Settings) -> None:
    for name in ("requests", "canvas"):
        if min(getattr(settings, name)) < 1:
            raise ValueError(f"--{name} must be whole numbers of at least 1.")
    names = ["tensor_parallel_size"] + (["context"] if settings.measures_steps else [])
    names += ["input_len", "output_len", "rounds"] if settings.request_modes else []
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1.")
    unknown = [name for name in settings.versus if name not in BASELINES]
    if unknown:
        raise ValueError(f"--vs {unknown[0]} is unknown; baselines: {', '.join(BASELINES)}.")
    for canvas in settings.canvas:
        if not settings.grid_requests(canvas):
            raise ValueError(
                f"--max-positions {settings.max_positions} leaves nothing of canvas {canvas} to "
                "measure: raise it."
            )
        block = settings.block(canvas)
        if block < 1 or canvas % block:
            raise ValueError(f"--canvas {canvas} is no whole number of blocks of {block}.")


def _check_combinations(settings: Settings, input_len: int | None) -> None:
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
        if settings.request_modes and settings.measured.by_confidence:
            raise ValueError(
                "--strategy d2f accepts by confidence, which dummy weights do not have: use "
                "block_diffusion with --tokens-per-forward, or --model."
            )
        if settings.request_modes and rate is None:
            raise ValueError("--shapes needs --tokens-per-forward: dummy weights accept nothing.")
        smallest = min(settings.block(canvas) for canvas in settings.canvas)
        if rate is not None and not 1 <= rate <= smallest:
            raise ValueError(
                f"--tokens-per-forward {rate:g} must lie between 1 and a block of {smallest}."
            )
        if rate is not None:
            grid = [(settings.block(c), settings.served_requests(c)) for c in settings.canvas]
            step_schedule.check(rate, settings.output_len, settings.rounds, grid)
        if settings.mode == WATCHED:
            _check_watched(settings)
    else:
        if rate is not None:
            raise ValueError("--tokens-per-forward is measured on a checkpoint: use --shapes.")
        if input_len is not None:
            raise ValueError("--input-len is what the prompts have on a checkpoint: use --shapes.")
        if settings.model is not None and "hf" in settings.versus:
            raise ValueError("--vs hf needs --shapes, or the bundled model: leave --model out.")
    single_block_from = settings.commit_alone_from
    if single_block_from and not all(map(settings.computes_next_block, settings.canvas)):
        raise ValueError(
            f"--commit-alone-from {single_block_from} needs the strategy block_diffusion and "
            "canvases of more than one block: leave it out."
        )
    if settings.compilation_config is not None and settings.enforce_eager:
        raise ValueError(
            "--compilation-config says how to compile, and --enforce-eager not to: leave one of "
            "them out."
        )
    if settings.mode == "step" and "hf" in settings.versus:
        raise ValueError("--vs hf serves whole requests: use the mode latency, throughput or all.")


def _check_watched(settings: Settings) -> None:
    """Raise ValueError unless steps can be counted in a stream, whose text comes by block."""
    most = max(settings.requests)
    if settings.watched[0] < 0 or settings.watched[-1] > most:
        raise ValueError(f"--watched must be numbers from 0 to --requests, which is {most}.")
    for canvas in settings.canvas:
        block = settings.block(canvas)
        if settings.output_len % block or settings.output_len < 4 * block:
            raise ValueError(
                f"--output-len {settings.output_len} is not at least four whole blocks of {block}: "
                f"use {max(4, -(-settings.output_len // block)) * block}."
            )
        if (steps := settings.steps_of_block(canvas)) % 1:
            raise ValueError(
                f"--tokens-per-forward {settings.tokens_per_forward:g} takes no whole number of "
                f"steps for a block of {block}: use {block / round(steps):g}."
            )
