"""Count what each step computed under full attention, whose forwards differ in size.

A refresh computes prompt and canvas, other forwards a block or all from a block on, and a step may
contain both. The engine counts positions and forwards of each step of the timed run
(:mod:`diffuplug_bench.step.counts`), but neither their keys nor their logits rows. So a second run
of the same requests asks for snapshots (``dllm_frames``), which name the block of each forward;
where forwards start and stop follows from the engine's own functions.

What shares a step is not taken from the second run: a forward of a watched request waits for the
result of the one before, so that its requests take turns, in twice as many and smaller steps.
"""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diffuplug_bench.request_loop import Answer, Ask, Run, serve
from diffuplug_bench.step.counts import Count
from diffuplug_bench.step.floor import StepSize
from dllm_plugin.config.carriers import NO_TOKEN
from dllm_plugin.config.decode import DecodeConfig, get_decode_config, layout_of
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.decoding.full_attention import Layout, bounds

if TYPE_CHECKING:
    from vllm import LLM


class Forward(NamedTuple):
    """Describe a forward of a request: the step it ran in, and its size."""

    step: int
    size: StepSize


def run_again(llm: "LLM", asks: Sequence[Ask], at_once: int) -> Run:
    """Serve requests and take a snapshot of each after every forward."""
    watched = []
    for ask in asks:
        extra = ask.sampling.get("extra_args", {}) | {"dllm_frames": 1}
        watched.append(ask._replace(sampling=ask.sampling | {"extra_args": extra}))
    return serve(llm, watched, at_once)


def sizes_of(counts: Sequence[Count], forwards: Sequence[Forward]) -> list[StepSize]:
    """Return the sizes of the steps of a timed run, without steps that computed nothing.

    Positions are as counted. Each forward has as many keys and logits rows as `forwards` of the
    same requests have on average: the time to read keys is the same however they are spread, and
    that of logits is nearly so.
    """
    keys = statistics.mean(one.size.keys for one in forwards)
    rows = statistics.mean(one.size.rows for one in forwards)
    sizes = []
    for count in counts:
        if count.positions:
            step = (round(count.forwards * keys), round(count.forwards * rows))
            sizes.append(StepSize(count.positions, *step))
    return sizes


def all_forwards(llm: "LLM", run: Run) -> list[Forward]:
    """Return the forwards of a run of :func:`run_again`, request by request.

    Raises ValueError if a request was preempted: its refreshes are not those of its schedule.
    """
    vllm_config = llm.llm_engine.vllm_config
    config = get_decode_config(vllm_config)
    found = []
    for answer in run.answers:
        forwards = forwards_of(answer, config, vllm_config.model_config.max_model_len)
        computed = len(answer.prompt) + answer.canvas_positions
        if sum(one.size.positions for one in forwards) != computed:
            raise ValueError(
                "a request was preempted: raise --gpu-memory-utilization, or lower --requests or "
                "--context."
            )
        found += forwards
    return found


def forwards_of(
    answer: Answer, config: DecodeConfig, max_model_len: int
) -> list[Forward]:
    """Return the forwards of a request that was answered with snapshots."""
    span, prompt_len = config.method.span, len(answer.prompt)
    assert span is not None, "other forwards have one size"
    max_tokens = answer.sampling["max_tokens"]
    asked = request_arguments(config, answer.sampling["extra_args"], max_tokens)
    end = min(prompt_len + max_tokens, max_model_len)
    numbers = layout_of(asked, prompt_len, end)
    layout = Layout(*np.array(numbers, dtype=np.int64)[:, None])
    forwards, last, left = [], -1, 0
    for step, snapshot in answer.snapshots:
        base = snapshot.start
        start = np.array([prompt_len + base], dtype=np.int64)
        canvas = bounds(layout, start, config.canvas_length, max_model_len)
        first, stop = span(canvas, np.array([base == last]))
        block = int(canvas.block_stop[0] - start[0])
        if base != last:
            left = block
        size = StepSize(int(stop[0] - first[0]), int(canvas.stop[0]), left)
        forwards.append(Forward(step, size))
        ids = snapshot.ids[:block]
        last, left = base, block - len(ids) + ids.count(NO_TOKEN)
    return forwards
