"""Stand between one request's handler and the engine, and count what passes.

What was read is added to vLLM's replies: whole replies and streams of events.
"""

import contextlib
import copy
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.engine.protocol import EngineClient
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tracing import (
    SpanAttributes,
    SpanKind,
    extract_trace_context,
    instrument_manual,
)

from dllm_plugin.config.carriers import (
    unpack_drafts,
    unpack_positions,
    unpack_snapshot,
    unpack_start,
    unpack_widths,
)
from dllm_plugin.config.request.arguments import GRAMMAR_MODES

from .frames import FrameSource, changed, trace_of

SPAN = "diffusion_decode"
PREFIX = "diffuplug."


class Counts(NamedTuple):
    """Store the cost of one choice.

    forwards            denoising steps, those that only commit included
    tokens              completion tokens
    computed_positions  queries of all forwards: prompt, refreshes and guidance included
    wasted_positions    those beyond one for each token of answer and uncached prompt
    grammar             how it kept to its grammar; None without a grammar
    drafts              drafts judged by causal forwards, and accepted; None if none judges
    """

    forwards: int
    tokens: int
    computed_positions: int
    wasted_positions: int
    grammar: str | None = None
    drafts: tuple[int, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and tokens per forward."""
        per_forward = round(self.tokens / self.forwards, 2) if self.forwards else 0.0
        fields: dict[str, Any] = {
            "forwards": self.forwards,
            "tokens": self.tokens,
            "tokens_per_forward": per_forward,
            "computed_positions": self.computed_positions,
            "wasted_positions": self.wasted_positions,
        }
        if self.grammar is not None:
            fields["grammar"] = self.grammar
        if self.drafts is not None:
            fields["drafted_tokens"], fields["accepted_tokens"] = self.drafts
        return fields


def counts_of(
    completion: CompletionOutput,
    tokens: int,
    prompt_tokens: int,
    cached: int | None = None,
) -> Counts | None:
    """Return the counts of a choice that ended; None if the scheduler sent none.

    Args:
        tokens: completion tokens of the choice.
        prompt_tokens: of the prompt, cached tokens included.
        cached: cached prompt tokens as vLLM reports them. Read only if canvases float;
            None: estimated from the positions that belong to no forward.
    """
    sent = completion.spec_decode_metrics
    if sent is None:  # aborted before the engine answered
        return None
    computed = unpack_positions(sent)
    mode = None
    widths = unpack_widths(sent)
    if widths is None:
        cached, mode = unpack_start(sent)
    elif cached is None:
        cached = max(0, prompt_tokens - (computed - sum(widths)))
    wasted = computed - (prompt_tokens - cached) - tokens
    grammar = None if mode is None else GRAMMAR_MODES[mode]
    forwards = sum(sent.histogram)
    wasted = max(wasted, 0)
    return Counts(forwards, tokens, computed, wasted, grammar, unpack_drafts(sent))


def total(of_choices: list[Counts]) -> Counts:
    """Return the sum over the choices of a request, which has one grammar at most."""
    columns = list(zip(*of_choices, strict=True))
    forwards, tokens, computed, wasted = map(sum, columns[:4])
    judged = [counts.drafts for counts in of_choices if counts.drafts is not None]
    drafts = [sum(column) for column in zip(*judged, strict=True)]
    both = (drafts[0], drafts[1]) if drafts else None
    return Counts(forwards, tokens, computed, wasted, of_choices[0].grammar, both)


@dataclasses.dataclass(eq=False)
class WatchedEngine:
    """Stand in for the engine client of one HTTP request's handler.

    strips  remove vLLM's own statistics from the outputs
    frames  where snapshots go
    trace   remove traces from the outputs
    tail    what a template gives after the answer, which counts as prompt
    calls   the reply is a stream that may call tools
    counts  of each choice that has ended, by the choice's index in the reply
    traces  of these choices, if the request asks for them
    """

    engine: EngineClient
    tracing: bool
    strips: bool
    frames: FrameSource | None = None
    trace: bool = False
    tail: Sequence[int] = ()
    calls: bool = False
    counts: dict[int, Counts] = dataclasses.field(default_factory=dict)
    traces: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    num_choices: int = 0
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as the engine does; a handler calls this for each prompt of a body."""
        first = self.num_choices
        if self.frames is not None and not first:
            # A handler of completions numbers the prompts of a body; its chunks do not.
            number = "-0" if request_id.startswith("cmpl-") else ""
            self.frames.request_id = request_id.removesuffix(number)
        self.num_choices += sampling_params.n
        outputs = self.engine.generate(prompt, sampling_params, request_id, **options)
        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        trace_headers = options.get("trace_headers")
        return self._follow(outputs, first, delta, request_id, trace_headers)

    async def _follow(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        first: int,
        delta: bool,
        request_id: str,
        trace_headers: Mapping[str, str] | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        started = time.time_ns()
        # An abandoned request is aborted when the engine's generator is closed.
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if self.tail:
                    ids = output.prompt_token_ids or ()
                    output.prompt_token_ids = [*ids, *self.tail]
                self._count(output, first, delta)
                if self.frames is None or self._has_text(output, first, self.frames):
                    if self.calls and _is_cut(output):
                        yield _without_end(output)
                    yield output
        if self.tracing:
            of_prompt = [c for i, c in self.counts.items() if i >= first]
            send_span(request_id, trace_headers, started, of_prompt)

    def _has_text(self, output: RequestOutput, first: int, frames: FrameSource) -> bool:
        """Move a snapshot to the frames; returns whether text or an end is left."""
        snapshot = unpack_snapshot(output)
        said = [c for c in output.outputs if c.token_ids or c.text or c.finish_reason]
        output.outputs = said
        for completion in said:
            index = first + completion.index
            frames.add_tokens(index, list(completion.token_ids))
            if completion.finish_reason is not None:
                counts = self.counts.get(index)
                if counts is None:
                    frames.end(index, 0)
                else:
                    frames.end(index, counts.forwards, counts.drafts)
        if snapshot is not None:
            # vLLM names the choices of one prompt by number and request.
            number, _, rest = snapshot.request_id.partition("_")
            choice = int(number) if rest.startswith(output.request_id) else 0
            frames.add_snapshot(first + choice, snapshot)
        return bool(said)

    def _count(self, output: RequestOutput, first: int, delta: bool) -> None:
        """Count tokens, and keep the counts of choices that end."""
        for completion in output.outputs:
            index = first + completion.index
            before = self.tokens.get(index, 0) if delta else 0
            self.tokens[index] = before + len(completion.token_ids)
            if completion.finish_reason is not None and index not in self.counts:
                self._end(index, completion, output)

    def _end(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> None:
        """Keep the counts and the trace of a choice that ends."""
        prompt_tokens = len(output.prompt_token_ids or ())
        # If several choices end in one output, vLLM reports the cached tokens of one.
        cached = output.num_cached_tokens if len(output.outputs) == 1 else None
        counts = counts_of(completion, self.tokens[index], prompt_tokens, cached)
        if counts is not None:
            self.counts[index] = counts
        if self.trace:
            self.traces[index] = trace_of(completion)
        if self.strips:
            completion.spec_decode_metrics = None


def _is_cut(output: RequestOutput) -> bool:
    """Return whether `max_tokens` cuts a choice in this output, which has text of it."""
    return any(c.finish_reason == "length" and c.text for c in output.outputs)


def _without_end(output: RequestOutput) -> RequestOutput:
    """Return the text of an output, and leave its end to the output that follows.

    To a chunk that has both, vLLM adds the arguments of a call that were read and not sent. Of a
    call without any it takes `{}`, which nobody wrote.
    """
    before = copy.copy(output)
    before.finished = False
    before.outputs = []
    for completion in output.outputs:
        before.outputs.append(dataclasses.replace(completion, finish_reason=None))
        completion.text, completion.token_ids = "", ()
        completion.logprobs = None if completion.logprobs is None else []
    return before


def send_span(
    request_id: str,
    headers: Mapping[str, str] | None,
    started: int,
    of_choices: list[Counts],
) -> None:
    """Send one span from `started` (nanoseconds) to now, a child of the request's own trace."""
    if not of_choices:
        return
    attributes = {SpanAttributes.GEN_AI_REQUEST_ID: request_id}
    for name, value in total(of_choices).as_json().items():
        attributes[PREFIX + name] = value
    instrument_manual(
        span_name=SPAN,
        start_time=started,
        attributes=attributes,
        context=extract_trace_context(headers),
        kind=SpanKind.INTERNAL,
    )


def add_counts(
    reply: dict[str, Any], engine: WatchedEngine, method: dict[str, str]
) -> dict[str, Any]:
    """Add ``diffusion`` to each choice that has ended, and to ``metrics`` beside usage.

    The choice's own has its trace as well, if the request asks for it.

    Args:
        reply: a reply or one chunk of a stream, as vLLM writes it.
        method: strategy and policy of the request.
    """
    for choice in reply["choices"]:
        counts = engine.counts.get(choice["index"])
        if choice.get("finish_reason") is not None and counts is not None:
            choice["diffusion"] = counts.as_json()
            if (trace := engine.traces.get(choice["index"])) is not None:
                choice["diffusion"]["trace"] = trace
    # A stream has its usage in a chunk without choices, after all of them have ended.
    whole = reply.get("object") in ("chat.completion", "text_completion")
    whole = whole or not reply["choices"]
    if whole and reply.get("usage") is not None and engine.counts:
        own = {k: v for k, v in (reply.get("metrics") or {}).items() if v is not None}
        together = total(list(engine.counts.values())).as_json()
        reply["metrics"] = own | {"diffusion": together | method}
    return reply


async def with_counts(
    events: AsyncGenerator[str, None], engine: WatchedEngine, method: dict[str, str]
) -> AsyncGenerator[str, None]:
    """Yield a stream's events; after a choice's end events may get its counts."""

    def change(chunk: dict[str, Any]) -> dict[str, Any]:
        return add_counts(chunk, engine, method)

    async with contextlib.aclosing(events):
        async for event in events:
            yield changed(event, change) if engine.counts else event
