"""Send requests to an engine and record when their tokens arrive.

vLLM sends one message per engine step, so messages count steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from diffuplug_bench.settings import requests_of
from diffuplug_bench.step.counts import Count, counting
from dllm_plugin.config.carriers import Snapshot, unpack_positions, unpack_snapshot

if TYPE_CHECKING:
    from vllm import LLM

Tick = Callable[["Run"], None]
NEVER_AT_ONCE = (
    "{} requests never ran all at once: their KV does not fit, or they ended too early; raise "
    "--gpu-memory-utilization, or lower --requests or --context."
)


class Arrival(NamedTuple):
    """Count the tokens that a message brought for a request."""

    step: int  # index into Run.stamps
    tokens: int


@dataclass
class Answer:
    """Record a request. Seconds are of the same clock as `Run.stamps`.

    snapshots   (step, snapshot) of each forward, if the request asked for them
    """

    prompt: list[int]
    sent: float
    arrivals: list[Arrival] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    forwards: int = 0  # denoising forwards; for autoregressive models the tokens
    canvas_positions: int = 0  # canvas positions that these forwards computed
    sampling: dict[str, Any] = field(default_factory=dict)
    snapshots: list[tuple[int, Snapshot]] = field(default_factory=list)


@dataclass
class Run:
    """Record a set of requests while it is served. Of each message there is a stamp and a count."""

    answers: list[Answer] = field(default_factory=list)
    # When each message had been processed.
    stamps: list[float] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    started: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the time from the first request sent to the last answer complete."""
        return self.stamps[-1] - self.started

    @property
    def tokens(self) -> int:
        """Return the tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def forwards(self) -> int:
        """Return the denoising forwards of all requests."""
        return sum(answer.forwards for answer in self.answers)

    @property
    def canvas_positions(self) -> int:
        """Return the canvas positions that these forwards computed."""
        return sum(answer.canvas_positions for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(len(answer.prompt) for answer in self.answers)


class Ask(NamedTuple):
    """Pair a prompt, as token ids, with keyword arguments of its SamplingParams."""

    prompt: list[int]
    sampling: dict[str, Any]


def asking_for(ask: Ask, variant: str | None) -> Ask:
    """Return a request that asks for an approximation too, if `variant` names one."""
    if variant is None:
        return ask
    extra = ask.sampling.get("extra_args", {}) | requests_of(variant)
    return ask._replace(sampling=ask.sampling | {"extra_args": extra})


def serve(
    llm: "LLM", asks: Sequence[Ask], at_once: int, tick: Tick | None = None
) -> Run:
    """Serve `asks` in order, `at_once` at a time; call `tick` after every message."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind, engine = RequestOutputKind.DELTA, llm.llm_engine
    run, waiting, open_by_id = Run(), list(asks), dict[str, Answer]()
    run.started = time.perf_counter()
    with counting(engine) as last_count:
        while waiting or open_by_id:
            while waiting and len(open_by_id) < at_once:
                ask = waiting.pop(0)
                sampling = SamplingParams(
                    temperature=0.0, output_kind=kind, **ask.sampling
                )
                answer = Answer(ask.prompt, time.perf_counter(), sampling=ask.sampling)
                run.answers.append(answer)
                name = f"bench-{len(run.answers)}"
                engine.add_request(name, {"prompt_token_ids": ask.prompt}, sampling)
                open_by_id[name] = answer
            outputs = engine.step()
            run.stamps.append(time.perf_counter())
            run.counts.append(last_count())
            for output in outputs:
                if _record(open_by_id[output.request_id], output, len(run.stamps) - 1):
                    del open_by_id[output.request_id]
            if tick is not None:
                tick(run)
    return run


def decoding_steps(run: Run, requests: int) -> tuple[int, int]:
    """Return two messages, between which the first `requests` of a run all decode."""
    first = run.answers[:requests]
    begin = max(answer.arrivals[0].step for answer in first)
    end = min(answer.arrivals[-1].step for answer in first)
    if end <= begin:
        raise ValueError(NEVER_AT_ONCE.format(requests))
    return begin, end


def decode_rate(run: Run, requests: int) -> float:
    """Return the tokens per second while the first `requests` of a run all decode."""
    begin, end = decoding_steps(run, requests)
    tokens = 0
    for answer in run.answers:
        for arrival in answer.arrivals:
            if begin < arrival.step <= end:
                tokens += arrival.tokens
    return tokens / (run.stamps[end] - run.stamps[begin])


def all_decode(run: Run, requests: int) -> bool:
    """Return whether so many requests have got their first tokens."""
    return sum(bool(answer.arrivals) for answer in run.answers) == requests


def _record(answer: Answer, output: Any, step: int) -> bool:
    """Record one output; return whether it was the request's last."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    if tokens:
        answer.arrivals.append(Arrival(step, len(tokens)))
        answer.token_ids += tokens
    snapshot = unpack_snapshot(output)
    if snapshot is not None:
        answer.snapshots.append((step, snapshot))
    if output.finished:
        answer.finished = True
        metrics = completion.spec_decode_metrics
        answer.forwards = sum(metrics.histogram) if metrics else len(answer.token_ids)
        answer.canvas_positions = answer.forwards - 1
        if metrics:  # of our engine, which count the prompt's positions too
            answer.canvas_positions = unpack_positions(metrics) - len(answer.prompt)
    return bool(output.finished)


class Window(NamedTuple):
    """Delimit messages of a run between which every step decoded every request."""

    first: int
    last: int
    step_ms: float
    # Step time in the fastest and slowest quarter of the window.
    spread_ms: tuple[float, float]


def steady_window(run: Run) -> Window:
    """Return the window from the last request's first tokens to the first last-but-one arrival.

    The last arrival of a request is left out: some requests end one step earlier than others. Both
    ends are messages of the same kind, so the delay of a message cancels. Raises ValueError if the
    requests never ran all at once.
    """
    first = max(answer.arrivals[0].step for answer in run.answers)
    last = min(answer.arrivals[-1].step for answer in run.answers) - 1
    ends = [first]
    for answer in run.answers:
        ends += [a.step for a in answer.arrivals if first <= a.step <= last]
    last = max(ends)
    if last - first < 4:
        raise ValueError(NEVER_AT_ONCE.format(len(run.answers)))
    quarters = [first + (last - first) * i // 4 for i in range(5)]
    pace = [_pace(run, a, b) for a, b in pairwise(quarters)]
    return Window(first, last, _pace(run, first, last), (min(pace), max(pace)))


def _pace(run: Run, first: int, last: int) -> float:
    return 1e3 * (run.stamps[last] - run.stamps[first]) / (last - first)
