"""WeDLM: recorded decodes, alone and together, and what else a request may ask for."""

import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import check_frequencies
from engines import (
    CHECKPOINTS,
    EngineRoom,
    a_prompt,
    forwards,
    free_pages,
    generate,
    params,
    results,
    token_ids,
)

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parents[1] / "goldens"
ENGINES = (("wedlm", False), ("wedlm", True), ("wedlm-qwen2", False))
# Tokens of which none is nearly sure.
LIKELY = {"wedlm": [41, 42, 52, 34], "wedlm-qwen2": [32, 66, 47, 64]}
Case = dict[str, Any]


@cache
def cases(model: str) -> list[Case]:
    name = f"{model.replace('-', '_')}_window"
    return json.loads((GOLDENS / f"{name}.json").read_text())["cases"]


def wish(case: Case) -> Any:
    settings = case["settings"]
    return params(
        settings["max_tokens"],
        stop_token_ids=settings["stop_token_ids"],
        dllm_window=settings["window_size"],
        dllm_entropy_threshold=settings["entropy_threshold"],
        dllm_position_penalty=settings["pos_penalty_factor"],
    )


def check(case: Case, output: Any) -> None:
    assert token_ids(output) == case["output_ids"], case["id"]
    assert forwards(output) == case["num_forwards"] - 1, case["id"]


@pytest.fixture(params=ENGINES, ids=["8b", "8b-async", "7b"], scope="module")
def engine(request: pytest.FixtureRequest, room: EngineRoom) -> tuple[str, Any]:
    model, overlapped = request.param
    dllm: dict[str, Any] = {}
    llm = room.start(model, dllm, async_scheduling=overlapped, max_model_len=160)
    return model, llm


def test_each_alone(engine: tuple[str, Any]) -> None:
    model, llm = engine
    for case in cases(model):
        check(case, generate(llm, [case["prompt_ids"]], wish(case))[0])


def test_together_in_shuffled_order(engine: tuple[str, Any]) -> None:
    model, llm = engine
    mixed = random.Random(1).sample(cases(model), len(cases(model)))
    outputs = generate(llm, [c["prompt_ids"] for c in mixed], [wish(c) for c in mixed])
    for case, output in zip(mixed, outputs, strict=True):
        check(case, output)


def test_aborted_and_preempted(engine: tuple[str, Any]) -> None:
    """Requests that come back go on as they would have; every page is given back."""
    model, llm = engine
    pages, done, step = free_pages(llm), {}, 0
    is_async = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    for case in cases(model):
        prompt = {"prompt_token_ids": case["prompt_ids"]}
        llm.llm_engine.add_request(case["id"], prompt, wish(case))
    while llm.llm_engine.has_unfinished_requests():
        done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
        step += 1
        if step == 4:
            llm.llm_engine.abort_request([cases(model)[0]["id"]])
        if step in (6, 15) and not is_async:
            assert llm.reset_prefix_cache(reset_running_requests=True)
    for case in cases(model)[1:]:
        assert token_ids(done[case["id"]]) == case["output_ids"], case["id"]
    assert free_pages(llm) == pages


def test_end_of_the_context_and_cached_prefix(engine: tuple[str, Any]) -> None:
    """A window ends with the context, and pages hold what causal decoding would store."""
    model, llm = engine
    plain = PlainModel.load(CHECKPOINTS / f"tiny-{model}")
    for left in (1, 5, 40):
        prompt = a_prompt(160 - left, left)
        [output] = generate(llm, [prompt], params(160))
        assert len(token_ids(output)) == left
    prompt = a_prompt(70, 5)
    for window in (16, 8):
        [output] = generate(llm, [prompt], params(40, dllm_window=window))
        rules = Rules("causal_window", "entropy", window=window)
        expected = decode(Text(plain, prompt, 40, rules))
        assert results([output]) == [(expected.tokens, expected.forwards)]
    assert output.num_cached_tokens == 64
    [more] = generate(llm, [prompt + token_ids(output)], params(8))
    assert more.num_cached_tokens >= 96
    text = prompt + token_ids(output)
    expected = decode(Text(plain, text, 8, Rules("causal_window", "entropy")))
    assert results([more]) == [(expected.tokens, expected.forwards)]


def test_sampling_and_rules(engine: tuple[str, Any]) -> None:
    """Answers do not depend on the batch; bans hold at every position."""
    _, llm = engine
    hot = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 20, "logprobs": 2}
    wishes = [
        params(30, **hot),
        params(30, **hot | {"seed": 8}, allowed_token_ids=list(range(64, 90))),
        params(30, stop_token_ids=list(range(120)), min_tokens=29),
        params(30, temperature=1.2, seed=3, dllm_window=4),
        params(30, repetition_penalty=1.5, frequency_penalty=0.5, dllm_trace=1),
    ]
    prompts = [a_prompt(9 + i, i) for i in range(len(wishes))]
    together = generate(llm, prompts, wishes)
    for prompt, one, output in zip(prompts, wishes, together, strict=True):
        assert results(generate(llm, [prompt], one)) == results([output])
    assert set(token_ids(together[1])) <= set(range(64, 90))
    assert len(token_ids(together[2])) >= 29
    for token, scored in zip(
        token_ids(together[0]), together[0].outputs[0].logprobs, strict=True
    ):
        assert token in scored


def test_sampled_texts_are_distributed_as_the_reference_samples(
    engine: tuple[str, Any],
) -> None:
    """Of 64 texts of three tokens of four: two tokens in one forward, one in the next."""
    model, llm = engine
    prompt, allowed, count = a_prompt(9, 2), LIKELY[model], 1200
    # Penalties of distance are larger than any entropy, so the threshold chooses the first two.
    window = {"dllm_window": 3, "dllm_position_penalty": 100.0}
    window["dllm_entropy_threshold"] = 150.0
    hot = {"temperature": 2.0, "top_p": 0.95, "allowed_token_ids": allowed}
    wishes = [params(3, seed=i, **hot, **window) for i in range(count)]
    outputs = generate(llm, [prompt] * count, wishes)
    plain = PlainModel.load(CHECKPOINTS / f"tiny-{model}")
    first = [_shares(plain, prompt, masks, allowed) for masks in (1, 2)]
    shares = {}
    for text in itertools.product(range(4), repeat=3):
        known = prompt + [allowed[i] for i in text[:2]]
        last = _shares(plain, known, 1, allowed)
        one, two, three = text
        share = first[0][one] * first[1][two] * last[three]
        shares[tuple(allowed[i] for i in text)] = float(share)
    check_frequencies([tuple(token_ids(output)) for output in outputs], shares)


def _shares(
    plain: PlainModel, known: list[int], masks: int, allowed: list[int]
) -> torch.Tensor:
    """Return the probabilities of allowed tokens at the last of some masks after a text.

    Top-p comes before temperature, as in the authors' sampler.
    """
    tokens = known + [plain.mask_id] * masks
    row = plain.predictions(tokens, list(range(len(tokens))))[-1, allowed]
    probs, order = row.softmax(-1).sort(descending=True)
    gone = order[probs.cumsum(0) - probs >= 0.95]
    return (row / 2.0).index_fill(0, gone, float("-inf")).softmax(-1)


REFUSED = [
    ({"dllm_window": 17}, "is longer than the canvas of 16 positions"),
    ({"dllm_block_length": 8}, "has no effect with strategy 'causal_window'"),
    ({"dllm_threshold": 0.5}, "has no effect with strategy 'causal_window'"),
    ({"dllm_early_text": 1}, "is not supported"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_is_not_served_is_refused(
    engine: tuple[str, Any], options: dict[str, Any], sentence: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=sentence):
        generate(engine[1], [[70, 71]], params(8, **options))
