"""The ordered list of step features: its order, its verbs, and what a step without them costs."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from mixed import BLOCK, D2F, fresh_compiler
from scripted import ARCHITECTURE, DEVICE, Loop, sampling
from scripted_rows import Hashed
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_plugin.sampling import canvas_rows
from dllm_plugin.sampling.features.automata import Automata
from dllm_plugin.sampling.features.bad_words import BadWords
from dllm_plugin.sampling.features.first_token import FirstTokenDecoder
from dllm_plugin.sampling.features.grammars import StagedChecks
from dllm_plugin.sampling.features.logprobs import LogprobStash
from dllm_plugin.sampling.features.penalties import Penalties
from dllm_plugin.sampling.features.templates import Targets, TemplateSteps
from dllm_plugin.sampling.features.token_rules import TokenRules
from dllm_plugin.sampling.features.watched_rows import WatchedRows

MOMENTS = (
    *("start_step", "start_rows", "apply", "score"),
    *("restrict", "commit", "finish_batch"),
)
# Before the features were one list, each number was larger by 5: some canvas positions were read
# or numbered twice.
OPERATIONS = {
    ("d2f", False): 365,
    ("d2f", True): 410,
    ("block", False): 376,
    ("block", True): 421,
}
# Of the compiled decision, for one request and for three.
NODES = {"d2f": [167, 167], "block": [202, 202]}
KINDS: dict[str, dict[str, Any]] = {"d2f": D2F, "block": BLOCK}


class Operations(TorchDispatchMode):
    """Count the operations of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def start(loop: Loop, count: int = 3, **options: Any) -> list[Any]:
    """Requests of the engine's policy, with prompts of several lengths."""
    return [
        loop.start([3] * (i + 1), Hashed(i), sampling(12, None, **options), f"{i}")
        for i in range(count)
    ]


def test_the_order_is_fixed() -> None:
    """Why each entry stands where it stands is commented in the list."""
    entries = Loop(D2F).sampler.features.entries
    assert [type(entry) for entry in entries] == [
        TokenRules,
        StagedChecks,
        Penalties,
        BadWords,
        Targets,
        TemplateSteps,
        Automata,
        LogprobStash,
        WatchedRows,
    ]


def test_first_tokens_follow_the_scores_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are scored by the same feature, and appended rows stay last."""
    monkeypatch.setitem(ARCHITECTURE, True, "Fast_dLLM_QwenForCausalLM")
    loop = Loop({"strategy": "block_diffusion", "block_length": 8}, True)
    kinds = [type(entry) for entry in loop.sampler.features.entries]
    assert kinds[-3:] == [LogprobStash, FirstTokenDecoder, WatchedRows]
    assert loop.sampler.features.active(np.array([0]))


def test_the_first_entry_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """`restrict` runs from the last entry to the first, all other moments from the first."""
    loop, calls = Loop(BLOCK), list[tuple[str, int]]()
    for place, entry in enumerate(loop.sampler.features.entries):
        monkeypatch.setattr(entry, "active", lambda slots_np: True)
        for moment in ("start_step", "restrict", "commit", "finish_batch"):

            def note(*values: Any, moment: str = moment, place: int = place) -> Any:
                calls.append((moment, place))
                return values[-1]

            monkeypatch.setattr(entry, moment, note)
    start(loop, 1)
    loop.step()  # a prefill: no canvas yet
    calls.clear()
    loop.step()
    places = list(range(len(loop.sampler.features.entries)))
    assert calls == [
        *(("start_step", place) for place in places),
        *(("restrict", place) for place in reversed(places)),
        *(("commit", place) for place in places),
        *(("finish_batch", place) for place in places),
    ]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="other devices launch other kernels")
@pytest.mark.parametrize(("kind", "shift"), OPERATIONS)
def test_a_step_without_features_runs_nothing_of_them(
    kind: str, shift: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No moment is called, and the operations are as many as ever."""
    loop = Loop(KINDS[kind], shift)

    def fail(*values: Any) -> None:
        raise AssertionError("a moment of a feature that no request uses")

    for entry in loop.sampler.features.entries:
        for moment in MOMENTS:
            monkeypatch.setattr(entry, moment, fail)
    runs = start(loop)
    loop.step()
    sampler, counted = loop.sampler, list[int]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(sampler, name)

        def __call__(self, *arguments: Any) -> Any:
            with Operations() as operations:
                output = sampler(*arguments)
            counted.append(operations.counts.total())
            return output

    loop.sampler = Counting()  # type: ignore[assignment]
    while not any(run.done for run in runs):
        loop.step()
    # Steps that a request has left are others: with fewer blocks, or a stop.
    assert counted[:7] == [OPERATIONS[kind, shift]] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_features_is_the_compiled_one(kind: str) -> None:
    """The decision is one graph; a request with a feature leaves it, and others return to it."""
    loop, graphs = Loop(KINDS[kind]), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        calls = [n for n in graph.graph.nodes if n.op.startswith("call")]
        graphs.append(len(calls))
        return graph

    with fresh_compiler(), torch.inference_mode():
        loop.sampler.compile(backend)
        assert graphs[1::2] == NODES[kind]
        decider, compiled_steps = loop.sampler.decider, list[int]()
        decide = decider.decide

        def note(step: Any, *rest: Any) -> Any:
            compiled_steps.append(len(step.slots_R))
            return decide(step, *rest)

        decider.decide = note
        runs = start(loop)
        loop.run()
        assert sum(compiled_steps) == sum(len(run.passes) for run in runs) > 0
        compiled_steps.clear()
        start(loop, 1, logprobs=1)
        loop.run()
        assert not compiled_steps
        runs = start(loop)
        loop.run()
        assert sum(compiled_steps) == sum(len(run.passes) for run in runs)


def test_a_slot_is_free_of_its_last_request() -> None:
    """Features of a request end with it, also if its slot is used again."""
    loop = Loop(D2F, slots=1)
    stash = loop.sampler.features[LogprobStash]
    expected = start(loop, 1)[0]
    loop.run()
    (scored,) = start(loop, 1, logprobs=2)
    slot = scored.slot
    assert stash.in_use and stash.users_np[slot]
    loop.run()
    assert not stash.in_use and not stash.users_np.any()
    (run,) = start(loop, 1)
    assert run.slot == slot and not loop.sampler.features.active(np.array([slot]))
    loop.run()
    assert run.output == expected.output == scored.output


def test_rows_are_read_as_the_features_of_a_request_ask() -> None:
    loop, words = Loop(D2F), sampling(9)
    words._bad_words_token_ids = [[4, 5]]
    features = loop.sampler.features
    asked = [sampling(9), words, sampling(9, logprobs=0)]
    assert [features.add_request(1, params) for params in asked] == [0, 1, 2]
    assert features.add_request(1, asked[0]) == 0


@pytest.mark.parametrize("shift", [False, True])
def test_automata_warm_up_for_every_kind_of_rows(
    shift: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model's type, those that steps keep, and copies; by the sampler's loop."""
    moved: list[Any] = []
    monkeypatch.setattr(canvas_rows, "move_rows", lambda *values: moved.append(values))
    loop, kinds = Loop(D2F, shift), list[tuple[torch.dtype, int]]()
    parts = [loop.sampler.rows, loop.sampler.proposer, *loop.sampler.features.entries]
    warmed: list[Any] = []
    for part in parts:

        def warm_up(*rows: Any, part: Any = part, given: Any = part.warm_up) -> None:
            warmed.append(part)
            given(*rows)

        monkeypatch.setattr(part, "warm_up", warm_up)
    automata, carry_NV = loop.sampler.features[Automata], loop.sampler.rows.carry_NV
    score_rows = automata.score_rows

    def note(tables: Any, rows: Any) -> Any:
        kinds.append((rows.logits_XV.dtype, len(rows.logits_XV)))
        return score_rows(tables, rows)

    monkeypatch.setattr(automata, "score_rows", note)
    logits_TV = torch.zeros(2, automata.rules.vocab_size, dtype=torch.bfloat16)
    loop.sampler._launch_examples(logits_TV)
    kept = [] if carry_NV is None else [(carry_NV.dtype, len(carry_NV))]
    every = [(torch.bfloat16, 2), *kept, (torch.float32, 1)]
    assert warmed == parts
    assert len(kept) == len(moved) == shift
    assert kinds == [kind for kind in every for biased in (False, True)]
