"""Define the settings of ``diffuplug bench``'s measuring modes. Light imports only."""

from dataclasses import dataclass, replace
from typing import Any

from dllm_plugin.decoding.families import (
    BLOCK_DIFFUSION,
    CAUSAL_WINDOW,
    D2F,
    DUAL_CACHE,
    INTROSPECTIVE,
    PREFIX_CACHE,
    SELF_SPECULATION,
    SEMI_AUTOREGRESSIVE,
)

WATCHED, ADAPTIVE, MAP = "watched", "adaptive", "map"
MODES = {
    "step": "time per denoising step, against the lower bound of its GEMMs",
    "throughput": "tokens per second, all requests at once",
    "latency": "seconds per request, one request at a time",
    "all": "step, throughput and latency on the same engines",
    WATCHED: "tokens per second of a server while some requests stream their frames",
    ADAPTIVE: "tokens per second by width, and by load",
    MAP: "for which loads diffusion is faster than left to right",
}
# The modes that serve whole requests in the engine, of each mode.
REQUEST_MODES = {
    "throughput": ("throughput",),
    "latency": ("latency",),
    "all": ("throughput", "latency"),
    WATCHED: (WATCHED,),
}
BASELINES = ("ar", "hf")
REFRESHES = ("full_refresh_every", "refresh_before", "suffix_window")
SWITCHES = ("compile_step", "vocab_parallel", "commit_alone_from", "kv_cache_layout")


@dataclass(frozen=True)
class Measured:
    """Describe how a strategy is measured.

    canvas         lengths of a canvas by default
    longest_block  positions of a block at most; None: half a canvas, so that two share a step
    timed_blocks   blocks during which all requests are timed
    next_block     a step may compute the block after the denoised one
    by_confidence  positions are accepted only by confidence, with a D2F adapter; else by schedule
    full_attention forwards differ in size, which is counted in a second run
    refreshes      some forwards compute everything, others trust the keys before a block
    """

    canvas: tuple[int, ...]
    longest_block: int | None
    timed_blocks: int
    next_block: bool = False
    by_confidence: bool = False
    full_attention: bool = False
    refreshes: bool = True


FULL_ATTENTION = Measured((256,), 32, 6, full_attention=True)
MEASURED = {
    BLOCK_DIFFUSION: Measured((32,), None, 6, next_block=True),
    # Fewer blocks, because a block takes as many steps as it has positions.
    D2F: Measured((128,), 32, 3, by_confidence=True),
    DUAL_CACHE: FULL_ATTENTION,
    PREFIX_CACHE: FULL_ATTENTION,
    SEMI_AUTOREGRESSIVE: replace(FULL_ATTENTION, refreshes=False),
}

# Strategies that mode adaptive measures by acceptance, and their longest drafts or window.
DRAFTS = {SELF_SPECULATION: 32, INTROSPECTIVE: 8, CAUSAL_WINDOW: 16}


def default_strategy(adapted: bool) -> str:
    """Return the strategy that is measured with an adapter, or without an adapter."""
    return D2F if adapted else BLOCK_DIFFUSION


@dataclass(frozen=True, kw_only=True)
class Settings:
    """List the settings of a measurement; lengths are in tokens.

    mode               key of `MODES`
    shapes, model      dummy weights of a named shape, or a checkpoint; neither: the bundled model
    requests           running at once; every number is a grid point
    canvas             positions computed per request and step; every length is an engine
    max_positions      grid points that would compute more per step are left out
    context            of mode step: tokens before the canvas, halfway through the measurement
    input_len          of the other modes, on dummy weights
    output_len         tokens that a request may generate
    rounds             of the other modes: requests that are answered one after another
    schedule           policy that unmasks as many positions in every step of a block
    tokens_per_forward on dummy weights: fixed by the schedule
    watched            of mode watched: requests that stream frames; every number is a grid point
    versus             baselines
    attention_backend  of the measured engine, not of the gate's: some take no float32
    compilation_config vLLM's, for the measured engine and, without sizes, for the gate's
    quantization       vLLM's, as kv_cache_dtype; of plain vLLM too, but not of the gate
    approximations     of full attention: each is measured after the engine's default
    """

    mode: str
    shapes: str | None
    model: str | None = None
    strategy: str
    requests: tuple[int, ...] = (1,)
    canvas: tuple[int, ...]
    max_positions: int | None = None
    block_length: int | None = None
    threshold: float | None = None
    schedule: str = "low_confidence"
    lora_path: str | None
    allow_unverified: bool | None = None
    context: int
    input_len: int
    output_len: int = 0
    rounds: int = 0
    tokens_per_forward: float | None = None
    watched: tuple[int, ...] = ()
    versus: tuple[str, ...] = ()
    profile: bool = False
    dtype: str
    enforce_eager: bool
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    attention_backend: str | None
    compilation_config: dict[str, Any] | None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    head_quantization: str | None = None
    compile_step: bool | None
    vocab_parallel: bool | None
    commit_alone_from: int | None
    kv_cache_layout: str | None
    full_refresh_every: int | None = None
    refresh_before: int | None = None
    suffix_window: int | None = None
    approximations: tuple[str, ...] = ()
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
        options: dict[str, Any] = {
            "strategy": self.strategy,
            "canvas_length": canvas,
            "block_length": self.block(canvas),
        }
        # Requests with a fixed schedule ask for this policy, so the engine compiles it.
        has_schedule = self.shapes is not None or self.mode == "step"
        if has_schedule and not self.measured.by_confidence:
            options["policy"] = self.schedule
        options |= self.given("threshold", "lora_path", "head_quantization")
        options |= self.given("allow_unverified")
        return options | self.refreshes | self.switches

    def given(self, *names: str) -> dict[str, Any]:
        """Return those settings of these names that are not None."""
        found = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        return found

    @property
    def refreshes(self) -> dict[str, Any]:
        """Return the approximations of full attention that were asked for."""
        return self.given(*REFRESHES)

    @property
    def switches(self) -> dict[str, Any]:
        """Return the decode options that change how a step is computed but no token."""
        return self.given(*SWITCHES)

    @property
    def variants(self) -> tuple[str | None, ...]:
        """Return what is measured at each grid point: the engine's default, and approximations."""
        return (None, *self.approximations)

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
        at_once: set[int] = set()
        if "throughput" in self.request_modes:
            at_once.update(self.grid_requests(canvas))
        if "latency" in self.request_modes:
            at_once.add(1)
        return tuple(sorted(at_once))

    @property
    def measures_steps(self) -> bool:
        """Return whether single steps are measured."""
        return self.mode in ("step", "all")

    @property
    def request_modes(self) -> tuple[str, ...]:
        """Return the chosen modes that serve whole requests."""
        return REQUEST_MODES.get(self.mode, ())

    def steps_of_block(self, canvas: int) -> float:
        """Return the denoising steps that a block takes at `tokens_per_forward`."""
        assert self.tokens_per_forward is not None
        return self.block(canvas) / self.tokens_per_forward


def refreshes_of(variant: str | None) -> dict[str, int]:
    """Return the decode options that ``8:32:32`` names; empty words are left out.

    Raises ValueError for another form.
    """
    if variant is None:
        return {}
    words = variant.split(":")
    found = {}
    for name, word in zip(REFRESHES, words, strict=False):
        if word.isdecimal():
            found[name] = int(word)
    filled = [word for word in words if word]
    if len(words) != len(REFRESHES) or not filled or len(filled) != len(found):
        raise ValueError(
            f"--approximations {variant} must be {':'.join(REFRESHES)} in numbers, as in 8:32:32."
        )
    return found


def requests_of(variant: str | None) -> dict[str, int]:
    """Return the request arguments that ask for an approximation."""
    return {f"dllm_{name}": value for name, value in refreshes_of(variant).items()}
