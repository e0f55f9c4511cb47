"""Floating canvases: the engine against a plain loop that computes everything in every pass."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import (
    CHECKPOINTS,
    EngineRoom,
    a_prompt,
    canvas_states,
    forwards,
    generate,
    num_preemptions,
    params,
    scheduler,
    step_through,
    token_ids,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from dllm_plugin.decoding.step_costs import Costs
from dllm_plugin.engine.scheduling.scheduler import DiffusionScheduler
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

pytestmark = pytest.mark.slow

# Name: checkpoint, strategy, block length, canvas, on a grid.
ENGINES: dict[str, tuple[str, str, int, int, bool]] = {
    "llada-d2f": ("llada", "d2f", 8, 40, False),
    "dream-d2f": ("dream", "d2f", 8, 40, False),
    "llada-blocks": ("llada", "block_diffusion", 16, 16, False),
    "dream-blocks": ("dream", "block_diffusion", 16, 16, False),
    "sdar": ("sdar", "block_diffusion", 4, 4, True),
    "llada2.0": ("llada2.0", "block_diffusion", 32, 32, True),
    "fast-dllm-v2": ("fast-dllm-v2", "block_diffusion", 32, 32, True),
}
THRESHOLD = 0.6
every_engine = pytest.mark.parametrize("name", ENGINES, scope="module")


def start(room: EngineRoom, name: str, overlapped: bool = False, **options: Any) -> Any:
    family, strategy, block, canvas, _ = ENGINES[name]
    dllm = {"strategy": strategy, "adaptive": "throughput", "threshold": THRESHOLD}
    dllm |= {"block_length": block, "canvas_length": canvas} | options.pop("dllm", {})
    return room.start(family, dllm, overlapped, **options)


def plain(name: str, prompt: list[int], max_tokens: int, widths: Sequence[int]) -> Text:
    """The plain loop's text."""
    family, _, block, canvas, on_grid = ENGINES[name]
    model = PlainModel.load(CHECKPOINTS / f"tiny-{family}")
    rules = Rules(
        "widths",
        block_length=block,
        canvas_length=canvas,
        on_grid=on_grid,
        threshold=THRESHOLD,
        widths=tuple(widths),
    )
    text = Text(model, prompt, max_tokens, rules, max_model_len=256)
    decode(text)
    return text


def schedules(name: str) -> list[list[int]]:
    """Widths of each kind, constant and changing ones."""
    canvas, draw = ENGINES[name][3], random.Random(name)
    constant = [[width] for width in (canvas, canvas // 2, 2)]
    return [*constant, [1, 2], [draw.randint(1, canvas) for _ in range(200)]]


def requests(name: str) -> list[tuple[list[int], int, list[int]]]:
    """Prompt, tokens and schedule of each."""
    sizes = [(9, 24), (30, 33), (45, 17), (1, 40), (64, 30)]
    return [
        (a_prompt(length, i), tokens, widths)
        for i, ((length, tokens), widths) in enumerate(
            zip(sizes, schedules(name), strict=True)
        )
    ]


def check(name: str, outputs: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Compare with the plain loop what is not too close to call; return how many were."""
    compared = 0
    for (prompt, tokens, widths), output in zip(wanted, outputs, strict=True):
        text = plain(name, prompt, tokens, widths)
        if text.margin > 3e-4:
            got = token_ids(output), forwards(output)
            assert got == text.result(), (
                len(prompt),
                tokens,
                widths[:5],
            )
            compared += 1
    return compared


@every_engine
@pytest.mark.parametrize(
    "overlapped", [False, True], ids=["sync", "async"], scope="module"
)
def test_schedules_equal_the_plain_loop(
    name: str, overlapped: bool, room: EngineRoom
) -> None:
    """All at once with ordinary requests beside them, then alone."""
    llm, wanted = start(room, name, overlapped), requests(name)
    wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
    prompts = [prompt for prompt, *_ in wanted]
    beside = [a_prompt(20, 7), a_prompt(33, 8)]
    outputs = generate(llm, prompts + beside, wishes + [params(30), params(20)])
    assert check(name, outputs[: len(wanted)], wanted) >= 4
    alone = [generate(llm, [prompts[i]], [wishes[i]])[0] for i in (1, 4)]
    check(name, alone, [wanted[1], wanted[4]])
    replayed = [
        (prompt, tokens, list(output.outputs[0].spec_decode_metrics.per_step_drafted))
        for prompt, tokens, output in zip(
            beside, (30, 20), outputs[len(wanted) :], strict=True
        )
    ]
    check(name, outputs[len(wanted) :], replayed)


def replays(
    llm: Any, prompts: Sequence[list[int]], wishes: Sequence[dict[str, Any]]
) -> float:
    """Each request arrives over time, and its record gives the same text alone: the mean width."""
    used: list[int] = []
    arrivals: dict[int, list[Any]] = {}
    for i, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        arrivals.setdefault(2 * i, []).append((str(i), prompt, params(**wish)))
    done = step_through(llm, arrivals)
    for i, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        first = done[str(i)]
        counts = first.outputs[0].spec_decode_metrics
        assert sum(counts.per_step_accepted) == len(token_ids(first))
        widths = list(counts.per_step_drafted)
        used += widths
        (again,) = generate(llm, [prompt], [params(**wish, dllm_schedule=widths)])
        assert token_ids(again) == token_ids(first), (i, widths)
        assert forwards(again) == forwards(first) == len(widths), i
        assert again.outputs[0].spec_decode_metrics.per_step_drafted == widths
    assert len(set(used)) > 1, "load changes the width"
    return sum(used) / len(used)


@every_engine
def test_a_record_replays(name: str, room: EngineRoom) -> None:
    """Widths chosen by load, greedy and seeded, in a batch and alone."""
    # Narrow windows from few requests on, as on a device that is full early.
    llm = start(room, name, overlapped=True, dllm={"min_window": 2})
    scheduler(llm).controller.costs = Costs(free=8, per_position=0.1)
    prompts = [a_prompt(5 + 7 * i, i) for i in range(12)]
    wishes: list[dict[str, Any]] = [{"max_tokens": 20 + i} for i in range(6)]
    wishes += [{"max_tokens": 20 + i, "temperature": 0.8, "seed": i} for i in range(6)]
    replays(llm, prompts, wishes)


def test_balanced_widths_are_wider(room: EngineRoom) -> None:
    """And their records replay."""
    prompts, wishes = (
        [a_prompt(5 + 7 * i, i) for i in range(12)],
        [{"max_tokens": 24}] * 12,
    )
    mean = {}
    for mode in ("throughput", "balanced"):
        llm = start(room, "llada-d2f", True, dllm={"min_window": 2, "adaptive": mode})
        scheduler(llm).controller.costs = Costs(free=8, per_position=0.1)
        mean[mode] = replays(llm, prompts, wishes)
    assert mean["balanced"] > mean["throughput"]


@pytest.mark.parametrize("name", ["llada-d2f", "dream-blocks", "sdar"])
def test_a_record_of_preempted_requests_replays(name: str, room: EngineRoom) -> None:
    """With pages for two of them at once; alone nothing preempts them."""
    pages = {"block_size": 32, "num_gpu_blocks_override": 9}
    llm = start(room, name, overlapped=True, dllm={"min_window": 2}, **pages)
    scheduler(llm).controller.costs = Costs(free=8, per_position=0.1)
    before, prompts = num_preemptions(llm), [a_prompt(20 + 3 * i, i) for i in range(6)]
    wishes: list[dict[str, Any]] = [{"max_tokens": 60} for _ in range(4)]
    wishes += [{"max_tokens": 60, "temperature": 0.8, "seed": i} for i in range(2)]
    replays(llm, prompts, wishes)
    assert num_preemptions(llm) > before


@every_engine
@pytest.mark.parametrize(
    "overlapped", [False, True], ids=["sync", "async"], scope="module"
)
def test_preempted_requests(name: str, overlapped: bool, room: EngineRoom) -> None:
    """Resumed texts are computed in the pieces in which they were committed."""
    llm = start(room, name, overlapped, block_size=32, num_gpu_blocks_override=9)
    before, wanted = num_preemptions(llm), []
    for i, widths in enumerate(schedules(name)[1:]):
        wanted.append((a_prompt(20 + 3 * i, i), 60, widths))
    wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
    outputs = generate(llm, [prompt for prompt, *_ in wanted], wishes)
    assert num_preemptions(llm) > before
    assert check(name, outputs, wanted) >= 3


@pytest.mark.parametrize("name", ["llada-d2f", "dream-d2f", "sdar"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_preempted_again_and_again(name: str, every: int, room: EngineRoom) -> None:
    llm, wanted = start(room, name), requests(name)[1:]
    engine, before, step, done = llm.llm_engine, num_preemptions(llm), 0, {}
    for i, (prompt, tokens, widths) in enumerate(wanted):
        wish = params(tokens, dllm_schedule=widths)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, wish)
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        step += 1
        # Every step would never get behind the prefill.
        if step % (every + 1) == 0:
            llm.reset_prefix_cache(reset_running_requests=True)
    assert num_preemptions(llm) > before + 4
    assert check(name, [done[str(i)] for i in range(len(wanted))], wanted) >= 3


def test_from_left_to_right(room: EngineRoom) -> None:
    """The narrowest widths decide one token a forward, and feed each as a mask and decided."""
    prompt, count = a_prompt(30, 2), 20
    for name, widths, positions in (
        ("llada-d2f", [1, 2], 2 * count - 1),
        ("llada2.0", [1, 2], 2 * count - 1),
        ("dream-d2f", [1], count),
        ("fast-dllm-v2", [1], count),
    ):
        llm = start(room, name, overlapped=True)
        (output,) = generate(llm, [prompt], [params(count, dllm_schedule=widths)])
        fed = output.outputs[0].spec_decode_metrics.per_step_drafted
        assert (forwards(output), sum(fed)) == (count, positions), name
        check(name, [output], [(prompt, count, widths)])


def test_the_end_of_the_context(room: EngineRoom) -> None:
    """Windows end with the context, whatever the schedule says."""
    for name in ("dream-d2f", "llada2.0"):
        llm = start(room, name, overlapped=True)
        wanted = [(a_prompt(256 - left, left), 60, [8]) for left in (1, 5, 17, 50)]
        wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
        assert (
            check(name, generate(llm, [one[0] for one in wanted], wishes), wanted) >= 3
        )


def test_what_ends_a_text_is_not_waited_for(room: EngineRoom) -> None:
    """A stop token behind a narrower window ends the text as soon as nothing before it is open."""
    llm, prompt = start(room, "llada-d2f", overlapped=True), a_prompt(30, 2)
    (whole,) = generate(llm, [prompt], [params(40, dllm_schedule=[40, 40, 40, 2])])
    stop = token_ids(whole)[11]
    cut = token_ids(whole)[: token_ids(whole).index(stop) + 1]
    wish = params(40, dllm_schedule=[40, 40, 40, 2], stop_token_ids=[stop])
    (ended,) = generate(llm, [prompt], [wish])
    assert token_ids(ended) == cut and forwards(ended) <= forwards(whole)


@pytest.mark.parametrize("name", ["dream-d2f", "sdar"])
def test_distinct_pages(name: str, room: EngineRoom) -> None:
    """Run and window as one span, with as many keys a token as its part sees."""
    dllm = {"kv_cache_layout": "distinct", "block_length": 8, "canvas_length": 40}
    if name == "sdar":
        dllm = {"kv_cache_layout": "distinct"}
    llm, wanted = start(room, name, dllm=dllm), requests(name)
    wishes = [params(tokens, dllm_schedule=widths) for _, tokens, widths in wanted]
    assert check(name, generate(llm, [one[0] for one in wanted], wishes), wanted) >= 4


def test_what_else_a_request_may_ask_for(room: EngineRoom) -> None:
    """Log-probabilities, traces, banned words and early ends do not change what is decoded."""
    llm, prompt = start(room, "dream-d2f", overlapped=True), a_prompt(30, 2)
    wish = {"max_tokens": 24, "dllm_schedule": [12, 3]}
    (bare,) = generate(llm, [prompt], [params(**wish)])
    asking = params(**wish, logprobs=2, dllm_trace=1, bad_words=["qqq"])
    (asked,) = generate(llm, [prompt], [asking])
    assert token_ids(asked) == token_ids(bare) and forwards(asked) == forwards(bare)
    (silent,) = generate(llm, [prompt], [params(**wish, dllm_statistics=0)])
    assert token_ids(silent) == token_ids(bare)
    assert silent.outputs[0].spec_decode_metrics is None
    steps = asked.outputs[0].routed_experts[:, 0]
    assert len(steps) == 24 and steps.min() >= 1 and steps.max() <= forwards(asked)
    found = asked.outputs[0].logprobs
    assert all(token in at for token, at in zip(token_ids(asked), found, strict=True))


WRONG_SCHEDULES: list[tuple[Any, str]] = [
    ([], "dllm_schedule must be a list of 1 to 4096 widths, got []"),
    ("8,4", "dllm_schedule must be a list of 1 to 4096 widths, got '8,4'"),
    ([8, 41], "between 1 and canvas_length 40, got 41 at place 1"),
    ([0], "between 1 and canvas_length 40, got 0 at place 0"),
    ([True], "got True at place 0"),
]


def test_refused_requests(room: EngineRoom) -> None:
    llm = start(room, "llada-d2f", overlapped=True)
    wrong = [
        ({"dllm_schedule": widths}, sentence) for widths, sentence in WRONG_SCHEDULES
    ]
    wrong += [
        (
            {"dllm_block_length": 16},
            "dllm_block_length has no effect with adaptive 'throughput'",
        ),
        ({"dllm_policy": "entropy"}, "policy 'entropy' has no meaning"),
        ({"dllm_steps": 8}, "steps has no effect"),
        ({"dllm_max_active_blocks": 2}, "max_active_blocks 2 exceeds the engine's 1"),
        ({"dllm_block_add_threshold": 0.5}, "block_add_threshold has no effect"),
        (
            {"dllm_schedule": [4], "dllm_template": [-1]},
            "dllm_template needs full attention",
        ),
        (
            {"structured_outputs": StructuredOutputsParams(regex="a+")},
            "structured_outputs cannot be combined with adaptive 'throughput'",
        ),
    ]
    for arguments, sentence in wrong:
        with pytest.raises(VLLMValidationError) as caught:
            generate(
                llm, [a_prompt(5)], [params(8, **({"ignore_eos": False} | arguments))]
            )
        assert sentence in str(caught.value), arguments


def test_nothing_of_it_runs_if_it_is_off(room: EngineRoom) -> None:
    """No scheduler, view, kernel or count of floating canvases; a schedule is refused by name."""
    llm = room.start("llada", {"strategy": "d2f"}, async_scheduling=True)
    assert type(scheduler(llm)) is DiffusionScheduler
    assert canvas_states(llm).floating is None
    with pytest.raises(VLLMValidationError, match="no effect with adaptive 'off'"):
        generate(llm, [a_prompt(5)], [params(8, dllm_schedule=[4])])
    called: set[str] = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename))
    try:
        (output,) = generate(llm, [a_prompt(5)], [params(8)])
    finally:
        sys.setprofile(None)
    ours = {Path(name).stem for name in called if "dllm_plugin" in name}
    assert {"scheduler", "reporting", "sequences", "block_causal"} <= ours
    assert not ours & {
        "floating",
        "widths",
        "acceptance",
        "adaptive_scheduler",
        "adaptive_metrics",
    }
    counts = output.outputs[0].spec_decode_metrics
    assert not counts.per_step_accepted and len(counts.per_step_drafted) == 1
