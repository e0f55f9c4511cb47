"""Hold and check the settings of ``diffuplug bench``'s measuring modes. Light imports only."""

from dataclasses import dataclass
from typing import Any

from diffuplug_bench import step_schedule
from diffuplug_bench.strategies import MEASURED, Measured
from dllm_plugin.config.options import Options

WATCHED, MAP = "watched", "map"
MODES = {
    "step": "time per denoising step, against the lower bound of its GEMMs",
    "throughput": "tokens per second, all requests at once",
    "latency": "seconds per request, one request at a time",
    "all": "step, throughput and latency on the same engines",
    WATCHED: "tokens per second of a server while some requests stream their frames",
}
BASELINES = ("ar", "hf")
REFRESHES = ("full_refresh_every", "refresh_before", "suffix_window")


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
    approximations     of full attention: each is measured beside what the engine does by default
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
    kv_cache_memory_bytes: int | None
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
    approximations: tuple[str, ...]
    seed: int

    @property
    def measured(self) -> Measured:
        """Return how the strategy is measured."""
        return MEASURED[self.strategy]

    def block(self, canvas: int) -> int:
        """Return the block length: the strategy's longest, or half a canvas."""
        if self.block_length is not None:
            return self.block_length
        longest = self.measured.longest_block
        return canvas // 2 if longest is None else min(longest, canvas)

    def dllm(self, canvas: int) -> dict[str, Any]:
        """Return the decode options of an engine."""
        scheduled = not self.measured.by_confidence and (
            self.shapes or self.mode == "step"
        )
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
        given = {name: getattr(self, name) for name in REFRESHES}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def variants(self) -> tuple[str | None, ...]:
        """Return what is measured at each grid point: the engine's default, and approximations."""
        return (None, *self.approximations)

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

    def positions_of_step(
        self, canvas: int, requests: int, single_block_from: int
    ) -> int:
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
        several = (
            self.grid_requests(canvas) if "throughput" in self.request_modes else ()
        )
        return tuple(
            sorted({*several, *((1,) if "latency" in self.request_modes else ())})
        )

    @property
    def measures_steps(self) -> bool:
        """Return whether single steps are measured."""
        return self.mode in ("step", "all")

    @property
    def request_modes(self) -> tuple[str, ...]:
        """Return the chosen modes that serve whole requests."""
        served = ("throughput", "latency")
        return (
            served
            if self.mode == "all"
            else (self.mode,) * (self.mode in (*served, WATCHED))
        )

    def steps_of_block(self, canvas: int) -> float:
        """Return the denoising steps that a block takes at `tokens_per_forward`."""
        assert self.tokens_per_forward is not None
        return self.block(canvas) / self.tokens_per_forward


def refreshes_of(variant: str | None) -> dict[str, int]:
    """Return the decode options that ``8:32:32`` stands for; what is left empty is the engine's.

    Raises ValueError for what does not read so.
    """
    words = [] if variant is None else variant.split(":")
    numbers = [word for word in words if word]
    if words and not (
        len(words) == len(REFRESHES)
        and numbers
        and all(word.isdecimal() for word in numbers)
    ):
        raise ValueError(
            f"--approximations {variant} must be {':'.join(REFRESHES)} in numbers, as in 8:32:32."
        )
    return {
        name: int(word) for name, word in zip(REFRESHES, words, strict=False) if word
    }


def requests_of(variant: str | None) -> dict[str, int]:
    """Return the request arguments that ask for an approximation."""
    return {f"dllm_{name}": value for name, value in refreshes_of(variant).items()}


def check(settings: Settings, input_len: int | None) -> None:
    """Raise ValueError with one sentence for settings that do not fit together."""
    _check_numbers(settings)
    _check_combinations(settings, input_len)
    for canvas in settings.canvas:
        for variant in settings.variants:
            Options.from_user(settings.dllm(canvas) | refreshes_of(variant))


def _check_numbers(settings: Settings) -> None:
    for name in ("requests", "canvas"):
        if (least := min(getattr(settings, name))) < 1:
            raise ValueError(
                f"--{name} must be whole numbers of at least 1, got {least}."
            )
    names = ["tensor_parallel_size"] + (["context"] if settings.measures_steps else [])
    names += ["input_len", "output_len", "rounds"] if settings.request_modes else []
    for name in names:
        if (value := getattr(settings, name)) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {value}."
            )
    unknown = [name for name in settings.versus if name not in BASELINES]
    if unknown:
        raise ValueError(
            f"--vs {unknown[0]} is unknown; baselines: {', '.join(BASELINES)}."
        )
    for canvas in settings.canvas:
        if not settings.grid_requests(canvas):
            raise ValueError(
                f"--max-positions {settings.max_positions} leaves nothing of canvas {canvas} to "
                "measure: raise it."
            )
        block = settings.block(canvas)
        if block < 1 or canvas % block:
            raise ValueError(
                f"--canvas {canvas} is no whole number of blocks of {block}."
            )


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
            raise ValueError(
                "--shapes needs --tokens-per-forward: dummy weights accept nothing."
            )
        smallest = min(settings.block(canvas) for canvas in settings.canvas)
        if rate is not None and not 1 <= rate <= smallest:
            raise ValueError(
                f"--tokens-per-forward {rate:g} must lie between 1 and a block of {smallest}."
            )
        if rate is not None:
            grid = [
                (settings.block(c), settings.served_requests(c))
                for c in settings.canvas
            ]
            step_schedule.check(rate, settings.output_len, settings.rounds, grid)
        if settings.mode == WATCHED:
            _check_watched(settings)
    else:
        if rate is not None:
            raise ValueError(
                "--tokens-per-forward is measured on a checkpoint: use --shapes."
            )
        if input_len is not None:
            raise ValueError(
                "--input-len is what the prompts have on a checkpoint: use --shapes."
            )
        if settings.model is not None and "hf" in settings.versus:
            raise ValueError(
                "--vs hf needs --shapes, or the bundled model: leave --model out."
            )
    _check_full_attention(settings)
    single_block_from = settings.commit_alone_from
    if single_block_from and not all(
        map(settings.computes_next_block, settings.canvas)
    ):
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
        raise ValueError(
            "--vs hf serves whole requests: use the mode latency, throughput or all."
        )


def _check_full_attention(settings: Settings) -> None:
    """Raise ValueError for what only some strategies with full attention can have."""
    asked = {
        name for variant in settings.approximations for name in refreshes_of(variant)
    }
    if asked - {"suffix_window"} and not settings.measured.refreshes:
        raise ValueError(
            f"--approximations of {settings.strategy} can have a suffix_window alone, as in ::32."
        )
    if settings.approximations and not settings.measured.full_attention:
        raise ValueError(
            f"--approximations are of full attention, not of --strategy {settings.strategy}."
        )
    if (
        settings.profile
        and settings.measured.full_attention
        and not settings.measured.refreshes
    ):
        raise ValueError(
            f"--profile needs forwards in full CUDA graphs, and those of --strategy "
            f"{settings.strategy} have piecewise ones: leave --profile out."
        )


def _check_watched(settings: Settings) -> None:
    """Raise ValueError unless steps can be counted in a stream, whose text comes by block."""
    most = max(settings.requests)
    if settings.watched[0] < 0 or settings.watched[-1] > most:
        raise ValueError(
            f"--watched must be numbers from 0 to --requests, which is {most}, got "
            f"{','.join(map(str, settings.watched))}."
        )
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
