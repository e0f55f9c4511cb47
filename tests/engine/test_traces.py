"""Traces: the forward and the confidence of each token, as the recorded decodes have them."""

from typing import Any, NamedTuple

import block_cases as joint
import numpy as np
import pytest
import test_golden_traces as d2f
import test_grid_goldens as grid
from engines import EngineRoom, a_prompt, generate, num_preemptions, params, token_ids
from full_goldens import cases_of as full_cases
from full_jobs import run_interrupted
from test_full_goldens import wish_for as full_wish
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.slow

LENGTH = 40
PROMPTS = [a_prompt(9, 1), a_prompt(30, 2), a_prompt(45, 3)]
CANVAS = {"canvas_length": 64}
ENGINES: dict[str, dict[str, Any]] = {
    "d2f-dream-async": {"family": "dream", "async_scheduling": True},
    "llada-dual_cache": {"dllm": {"strategy": "dual_cache"} | CANVAS},
    "llada-prefix_cache": {"dllm": {"strategy": "prefix_cache"} | CANVAS},
    "dream-semi_autoregressive": {
        "family": "dream",
        "dllm": {"strategy": "semi_autoregressive"} | CANVAS,
    },
    "llada-semi_autoregressive-async": {
        "dllm": {"strategy": "semi_autoregressive"} | CANVAS,
        "async_scheduling": True,
    },
    "sdar-async": {"family": "sdar", "dllm": CANVAS, "async_scheduling": True},
    "llada2.0": {"family": "llada2.0", "dllm": CANVAS},
    "llada2.1-async": {"family": "llada2.1", "dllm": CANVAS, "async_scheduling": True},
    "fast-dllm-v2": {"family": "fast-dllm-v2", "dllm": {}},
}
FULL = [name for name in ENGINES if "_" in name]
# Those of SDAR and LLaDA2.0 are compared in `test_grid_goldens.py`.
COMPARED = [name for name in ENGINES if name not in ("llada2.0", "sdar-async")]
every_engine = pytest.mark.parametrize("name", COMPARED, scope="module")


class Recorded(NamedTuple):
    """A recorded decode: the calls of the reference that are forwards of ours."""

    case: dict[str, Any]
    wish: Any
    calls: list[dict[str, Any]]

    def steps(self, num_tokens: int) -> list[int]:
        """At which forward each token was written last; 0: before the first."""
        steps = {p: i for i, one in enumerate(self.calls, 1) for p, _ in one["new"]}
        first = len(self.case["prompt_ids"])
        return [steps.get(first + i, 0) for i in range(num_tokens)]


def recorded(name: str) -> list[Recorded]:
    """What the references made of all prompts of an engine's family and strategy."""
    family, _, rest = name.removesuffix("-async").partition("-")
    if name in FULL:
        cases = [case for case in full_cases(family, rest) if not case.is_random]
        return [Recorded(c.record, full_wish(c), c.record["forwards"]) for c in cases]
    if family == "d2f":
        return [Recorded(c, d2f.wish_for(c), c["forwards"]) for c in d2f.cases_of(rest)]
    if family in grid.FILES:
        of_grid = [(c, grid.wish(c), c["forwards"]) for c in grid.cases_of(family)]
        kinds = ("denoise", "window")  # ours store a block together with the next one
        return [
            Recorded(c, w, [one for one in f if one["kind"] in kinds])
            for c, w, f in of_grid
        ]
    if family == "llada2.1":
        cases = [(c, joint.wish(c), c["forwards"]) for c in joint.cases_of(family)]
        return [Recorded(c, w, without_checks(f)) for c, w, f in cases]
    of_fast = [
        (c, joint.wish(c), c["forwards"]) for c in joint.cases_of(f"{family}-{rest}")
    ]
    return [
        Recorded(c, w, [one for one in f if one["kind"] != "prefill"])
        for c, w, f in of_fast
    ]


def without_checks(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without calls that only find nothing to edit: they ride along with the next block."""
    behind = [*calls[1:], {"kv_len": 0}]
    return [
        a
        for a, b in zip(calls, behind, strict=True)
        if a["new"] or a["kv_len"] >= b["kv_len"]
    ]


def asking(wish: Any, **options: Any) -> Any:
    """The same wish with a trace."""
    wish = wish.clone()
    wish.extra_args = (wish.extra_args or {}) | {"dllm_trace": 1}
    for name, value in options.items():
        setattr(wish, name, value)
    return wish


def trace(output: Any) -> tuple[list[int], np.ndarray]:
    """Forwards and confidences of the first completion's tokens."""
    rows = output.outputs[0].routed_experts
    assert rows.shape == (len(token_ids(output)), 2) and rows.dtype == np.float32
    return rows[:, 0].astype(int).tolist(), rows[:, 1]


@every_engine
def test_steps_of_the_references(name: str, room: EngineRoom) -> None:
    """All at once; every second request also asks for log-probabilities."""
    llm, cases = room.start(**ENGINES[name]), recorded(name)
    wishes = [
        asking(r.wish, logprobs=0 if i % 2 else None) for i, r in enumerate(cases)
    ]
    outputs = generate(llm, [r.case["prompt_ids"] for r in cases], wishes)
    for one, output in zip(cases, outputs, strict=True):
        tokens = token_ids(output)
        assert tokens == one.case["output_ids"][: len(tokens)]
        steps, certain = trace(output)
        assert steps == one.steps(len(tokens)), (name, one.case["id"])
        known = certain[~np.isnan(certain)]
        assert len(known) == len(tokens) or name == "fast-dllm-v2"
        assert (known > 0).all() and (known <= 1).all()
        if (found := output.outputs[0].logprobs) is not None:
            likely = [entry[t].logprob for entry, t in zip(found, tokens, strict=True)]
            close = np.exp(likely)[~np.isnan(certain)] / known
            # Confidence leaves the mask token out; some options also EOS.
            assert (close < 1 + 1e-3).all() and np.median(close) > 0.95


def check_undisturbed(alone: list[Any], outputs: list[Any]) -> None:
    for one, other in zip(alone, outputs, strict=True):
        assert token_ids(one) == token_ids(other)
        assert trace(one)[0] == trace(other)[0]
        np.testing.assert_allclose(trace(one)[1], trace(other)[1], atol=1e-4)


@pytest.mark.parametrize("name", ["llada2.0", "fast-dllm-v2"], scope="module")
def test_preempted_as_undisturbed(name: str, room: EngineRoom) -> None:
    """Open blocks are kept, so the same forwards decide the same tokens."""
    llm, wish = room.start(**ENGINES[name]), params(LENGTH, dllm_trace=1)
    alone, before = generate(llm, PROMPTS, wish), num_preemptions(llm)
    outputs = run_interrupted(llm, [(prompt, wish) for prompt in PROMPTS], every=5)
    assert num_preemptions(llm) > before
    check_undisturbed(alone, outputs)


def test_preempted_while_the_next_step_is_scheduled(room: EngineRoom) -> None:
    """Asynchronously, by memory that holds one request and a half."""
    tight = {"block_size": 32, "num_gpu_blocks_override": 6, "max_model_len": 128}
    llm = room.start(**ENGINES["sdar-async"], **tight)
    wish = params(LENGTH, dllm_trace=1)
    alone = [generate(llm, [prompt], wish)[0] for prompt in PROMPTS]
    before = num_preemptions(llm)
    outputs = generate(llm, PROMPTS, wish)
    assert num_preemptions(llm) > before
    check_undisturbed(alone, outputs)


# Asynchronously a reset of the prefix cache preempts nobody.
@pytest.mark.parametrize(
    "name", [n for n in FULL if not n.endswith("-async")], scope="module"
)
def test_a_block_that_starts_again(name: str, room: EngineRoom) -> None:
    """Under full attention: its tokens have the forwards that decided them in the end."""
    llm = room.start(**ENGINES[name])
    wish = params(
        LENGTH, dllm_trace=1, dllm_policy="low_confidence", dllm_block_length=20
    )
    wish.extra_args["dllm_steps"] = 5
    [alone] = generate(llm, PROMPTS[:1], wish)
    [output] = run_interrupted(llm, [(PROMPTS[0], wish)], every=8)
    # Preempted behind the third forward of the second block, which takes five again.
    first, again = np.array(trace(alone)[0]), np.array(trace(output)[0])
    assert token_ids(alone) == token_ids(output)
    np.testing.assert_equal(again, first + 3 * (np.arange(LENGTH) >= 20))


def test_refused_beside_experts(room: EngineRoom) -> None:
    """vLLM's own rows travel in the same field."""
    llm = room.start("sdar-moe", {}, enable_return_routed_experts=True)
    [output] = generate(llm, PROMPTS[:1], params(LENGTH))
    assert output.outputs[0].routed_experts is not None
    with pytest.raises(
        VLLMValidationError, match="which enable_return_routed_experts fills"
    ):
        generate(llm, PROMPTS[:1], params(LENGTH, dllm_trace=1))


@pytest.mark.parametrize(
    "name", ["dream-semi_autoregressive", "sdar-async"], scope="module"
)
def test_choices_stops_and_early_text(name: str, room: EngineRoom) -> None:
    """Each choice has a trace of its own, as long as the tokens that are left of it."""
    llm = room.start(**ENGINES[name])
    hot = {"temperature": 0.9, "seed": 3, "n": 3}
    [whole] = generate(llm, PROMPTS[:1], params(LENGTH, dllm_trace=1, **hot))
    [early] = generate(
        llm, PROMPTS[:1], params(LENGTH, dllm_trace=1, dllm_early_text=1, **hot)
    )
    assert len({tuple(c.token_ids) for c in whole.outputs}) == 3
    for one, other in zip(whole.outputs, early.outputs, strict=True):
        np.testing.assert_equal(one.routed_experts, other.routed_experts)
        assert one.token_ids == other.token_ids
        stop = next(t for t in one.text[len(one.text) // 2 :] if t.isprintable())
        [cut] = generate(
            llm,
            PROMPTS[:1],
            params(LENGTH, dllm_trace=1, **hot | {"stop": [stop], "detokenize": True}),
        )
        ended = cut.outputs[one.index]
        assert 0 < len(ended.token_ids) < LENGTH and ended.finish_reason == "stop"
        kept = one.routed_experts[: len(ended.token_ids)]
        np.testing.assert_equal(ended.routed_experts, kept)
