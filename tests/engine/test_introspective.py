"""I-DLM: recorded decodes; its text is that of causal decoding, whatever is drafted."""

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
    LETTERS,
    EngineRoom,
    a_prompt,
    check_prompt_logprobs,
    forwards,
    free_pages,
    generate,
    letters,
    num_preemptions,
    params,
    results,
    streamed,
    token_ids,
)
from grammar_requests import same_for_any_drafts
from grammar_requests import wish as wish_grammar

from dllm_plugin.config.carriers import unpack_drafts, unpack_snapshot
from dllm_plugin.reference.model import PlainModel

GOLDENS = Path(__file__).parents[1] / "goldens"
CONTEXT = 160
STRIDES = (1, 2, 4, 7, 16)
Case = dict[str, Any]


@cache
def cases() -> list[Case]:
    return json.loads((GOLDENS / "idlm_greedy.json").read_text())["cases"]


@cache
def model() -> PlainModel:
    return PlainModel.load(CHECKPOINTS / "tiny-idlm")


def wish(case: Case) -> Any:
    settings = case["settings"]
    return params(
        settings["max_new_tokens"],
        stop_token_ids=[settings["eos_token_id"]],
        dllm_block_length=settings["gen_block_size"],
    )


def check(case: Case, output: Any) -> None:
    assert token_ids(output) == case["output_ids"], case["id"]
    assert forwards(output) == case["num_forwards"] - 1, case["id"]


def start(room: EngineRoom, overlapped: bool = False) -> Any:
    dllm = {"canvas_length": 32}
    return room.start("idlm", dllm, async_scheduling=overlapped, max_model_len=CONTEXT)


@pytest.fixture(params=[False, True], ids=["sync", "async"], scope="module")
def llm(request: pytest.FixtureRequest, room: EngineRoom) -> Any:
    return start(room, request.param)


def test_each_alone(llm: Any) -> None:
    for case in cases():
        check(case, generate(llm, [case["prompt_ids"]], wish(case))[0])


def test_together_in_shuffled_order(llm: Any) -> None:
    mixed = random.Random(1).sample(cases(), len(cases()))
    outputs = generate(llm, [c["prompt_ids"] for c in mixed], [wish(c) for c in mixed])
    for case, output in zip(mixed, outputs, strict=True):
        check(case, output)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20}])
def test_text_is_that_of_causal_decoding(llm: Any, sampling: dict[str, Any]) -> None:
    """A stride of 1 decodes a token a forward; longer strides take fewer forwards."""
    prompt, texts, counts = a_prompt(20), [], []
    for stride in STRIDES:
        one = params(40, seed=3, **sampling, dllm_block_length=stride)
        [output] = generate(llm, [prompt], one)
        texts.append(token_ids(output))
        counts.append(forwards(output))
    assert texts == texts[:1] * len(STRIDES)
    assert counts[0] in (39, 40) and min(counts) < counts[0]


def test_end_of_the_context(llm: Any) -> None:
    """Where fewer positions are left than a stride computes, the text is the same."""
    prompts = [a_prompt(CONTEXT - left, left) for left in (1, 2, 5, 9, 17, 40)]
    alone = generate(llm, prompts, params(CONTEXT, dllm_block_length=1))
    for stride in STRIDES[1:]:
        outputs = generate(llm, prompts, params(CONTEXT, dllm_block_length=stride))
        assert [token_ids(o) for o in outputs] == [token_ids(o) for o in alone]


def test_aborted_and_preempted(llm: Any) -> None:
    """Requests that come back go on as they would have; every page is given back."""
    engine, pages, before = llm.llm_engine, free_pages(llm), num_preemptions(llm)
    for case in cases():
        prompt = {"prompt_token_ids": case["prompt_ids"]}
        engine.add_request(case["id"], prompt, wish(case))
    step, done, gone = 0, {}, cases()[0]["id"]
    is_async = engine.vllm_config.scheduler_config.async_scheduling
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        step += 1
        if step == 4:
            engine.abort_request([gone])
        if step in (6, 15) and not is_async:
            assert llm.reset_prefix_cache(reset_running_requests=True)
    for case in cases()[1:]:
        assert token_ids(done[case["id"]]) == case["output_ids"], case["id"]
    assert free_pages(llm) == pages
    assert is_async or num_preemptions(llm) > before


def test_cached_prefix(llm: Any) -> None:
    """Pages hold what causal forwards stored, so requests of any stride share them."""
    prompt = a_prompt(70, 5)
    wishes = [params(40, dllm_block_length=stride) for stride in (4, 3, 8)]
    first, *others = [generate(llm, [prompt], one)[0] for one in wishes]
    longer = generate(llm, [prompt + token_ids(first)], params(8))[0]
    assert longer.num_cached_tokens >= 96
    for output in others:
        assert token_ids(output) == token_ids(first)
        assert output.num_cached_tokens == 64


def test_logprobs_are_those_of_causal_rows(llm: Any) -> None:
    prompt = a_prompt(12, 8)
    [output] = generate(llm, [prompt], params(24, logprobs=3, dllm_block_length=4))
    text = prompt + token_ids(output)
    rows = model().predictions(text, list(range(len(text))))[len(prompt) :]
    scores = rows.log_softmax(-1)
    for row, token, found in zip(
        scores, token_ids(output), output.outputs[0].logprobs, strict=True
    ):
        assert {token, *row.topk(3).indices.tolist()} == set(found)
        for i, one in found.items():
            assert abs(one.logprob - float(row[i])) < 1e-3


def test_logprobs_of_prompts_are_those_of_causal_rows(llm: Any) -> None:
    """Beside requests that ask for none, and again if pages of the prompt are cached."""
    prompts = [a_prompt(length, 8) for length in (1, 2, 70, 70, 33)]
    wishes = [params(9, prompt_logprobs=k) for k in (2, 0, 3, 3)]
    outputs = generate(llm, prompts, [*wishes, params(9)])
    assert outputs[-1].prompt_logprobs is None
    alone = generate(llm, prompts, params(9))
    assert list(map(token_ids, outputs)) == list(map(token_ids, alone))
    for prompt, one, output in zip(prompts, wishes, outputs, strict=False):
        check_prompt_logprobs(model(), prompt, one.prompt_logprobs, output)


def test_sampled_texts_are_distributed_as_causal_decoding_samples(llm: Any) -> None:
    """Of 64 texts of three tokens of four; filters leave out some of them."""
    prompt, allowed, count = a_prompt(9, 2), [111, 35, 81, 46], 1200
    hot = {"temperature": 2.0, "top_p": 0.95, "allowed_token_ids": allowed}
    wishes = [params(3, seed=i, dllm_block_length=3, **hot) for i in range(count)]
    outputs = generate(llm, [prompt] * count, wishes)
    found = [tuple(token_ids(output)) for output in outputs]
    shares = {}
    for text in itertools.product(allowed, repeat=3):
        shares[text] = _probability(prompt, text, allowed)
    check_frequencies(found, shares)
    assert min(map(forwards, outputs)) < 3


def _probability(prompt: list[int], text: tuple[int, ...], allowed: list[int]) -> float:
    """Probability of a text under causal sampling at temperature 2 and top-p 0.95."""
    share = 1.0
    for place, token in enumerate(text):
        probs, order = _row((*prompt, *text[:place]), tuple(allowed))
        before = probs[order[: order.tolist().index(allowed.index(token))]].sum()
        kept = probs[order][probs[order].cumsum(0) - probs[order] < 0.95].sum()
        share *= float(probs[allowed.index(token)] / kept) if before < 0.95 else 0.0
    return share


@cache
def _row(
    tokens: tuple[int, ...], allowed: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the next token, and their order."""
    rows = model().rows(list(tokens), list(range(len(tokens))))
    probs = (rows[-1, list(allowed)] / 2.0).softmax(-1)
    return probs, probs.argsort(descending=True)


@pytest.mark.parametrize("stride", [1, 4])
def test_traces_and_snapshots(llm: Any, stride: int) -> None:
    """Watching changes nothing; each token has the forward that accepted it."""
    for case in cases()[:6]:
        wishes = [
            params(24, dllm_block_length=stride, **names)
            for names in ({}, {"dllm_trace": 1, "dllm_frames": 1})
        ]
        plain, output = generate(llm, [case["prompt_ids"]] * 2, wishes)
        assert results([output]) == results([plain])
        rows = output.outputs[0].routed_experts
        steps, sure = rows[:, 0].tolist(), rows[:, 1]
        assert steps == sorted(steps) and steps[0] == 0
        assert 1 <= steps[-1] <= forwards(output)
        assert len(set(steps)) >= len(steps) // stride
        assert ((sure[1:] > 0) & (sure[1:] <= 1)).all()
        snapshot = unpack_snapshot(output)
        assert snapshot is not None and snapshot.forward == forwards(output)
        counts = output.outputs[0].spec_decode_metrics
        assert snapshot.drafts == unpack_drafts(counts) is not None


def test_n_completions_and_rules(llm: Any) -> None:
    """Seeds count up; bans and biases hold for every token, drafted or not."""
    prompt, hot = a_prompt(15, 4), {"temperature": 0.9, "seed": 20}
    [many] = generate(llm, [prompt], params(30, n=3, **hot))
    for i, completion in enumerate(many.outputs):
        [single] = generate(llm, [prompt], params(30, **hot | {"seed": 20 + i}))
        assert list(completion.token_ids) == token_ids(single)
    wishes = [
        params(30, allowed_token_ids=list(range(64, 90)), **hot),
        params(30, stop_token_ids=list(range(120)), min_tokens=29),
        params(30, logit_bias={65: 40, 66: 39}, temperature=0.9, seed=1, min_p=0.1),
    ]
    together = generate(llm, [prompt] * 3, wishes)
    for one, output in zip(wishes, together, strict=True):
        # Lengths of drafts follow the load.
        [alone] = generate(llm, [prompt], one)
        assert token_ids(alone) == token_ids(output)
    assert set(token_ids(together[0])) <= set(range(64, 90))
    assert len(token_ids(together[1])) >= 29
    assert set(token_ids(together[2])) <= {65, 66}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 2}])
def test_penalties_and_bad_words_do_not_depend_on_drafts(
    llm: Any, sampling: dict[str, Any]
) -> None:
    """A row counts the text before it; a word of several tokens ends nowhere."""
    prompt, asked = letters(14, 6), {"allowed_token_ids": LETTERS}
    [free] = generate(llm, [prompt], params(30, **sampling, **asked))
    words = [free.outputs[0].text[i : i + 2] for i in (3, 9, 20)]
    rules: list[dict[str, Any]] = [
        {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        {"bad_words": words},
        {"repetition_penalty": 0.8, "bad_words": words, "logprobs": 1},
    ]
    for rule in rules:
        wishes = [
            params(30, **sampling, **asked, **rule, dllm_block_length=stride)
            for stride in STRIDES
        ]
        outputs = generate(llm, [prompt] * len(wishes), wishes)
        texts = [output.outputs[0].text for output in outputs]
        assert texts == texts[:1] * len(texts) and texts[0] != free.outputs[0].text
        for word in rule.get("bad_words", ()):
            assert word not in texts[0]


def test_a_stop_string_ends_the_text_at_the_same_place(llm: Any) -> None:
    """Whatever one forward committed; outputs grow, and are never taken back."""
    prompt, asked = letters(14, 6), {"allowed_token_ids": LETTERS}
    [free] = generate(llm, [prompt], params(30, **asked))
    stop = free.outputs[0].text[11:13]
    texts = []
    for stride in STRIDES:
        one = params(30, **asked, stop=[stop], dllm_block_length=stride)
        texts.append(streamed(llm, prompt, one))
    text = free.outputs[0].text
    assert texts == [text[: text.index(stop)]] * len(STRIDES)


def test_penalties_are_those_of_causal_decoding(llm: Any) -> None:
    """Of vLLM's formulas, over the prompt and what follows it."""
    prompt = letters(14, 6)
    numbers = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    one = params(20, repetition_penalty=1.3, **numbers)
    [output] = generate(llm, [prompt], one)
    text = list(prompt)
    for _ in range(20):
        row = model().predictions([*text, 0], list(range(len(text) + 1)))[len(text)]
        row[model().mask_id] = float("-inf")
        seen = torch.tensor(sorted(set(text)))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        for token in text[len(prompt) :]:
            row[token] -= 0.4
        for token in set(text[len(prompt) :]):
            row[token] -= 0.6
        text.append(int(row.argmax()))
    assert token_ids(output) == text[len(prompt) :]


REFUSED = [
    ({"dllm_block_length": 17}, "is longer than the canvas of 16 positions"),
    ({"prompt_logprob_token_ids": [[5]]}, "rows of prompts do not become logits"),
    ({"dllm_early_text": 1}, "is not supported"),
    ({"dllm_steps": 2}, "has no effect with strategy 'introspective'"),
    ({"dllm_template": [-1, 5]}, "sees the text after a gap"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_is_not_served_is_refused(
    llm: Any, options: dict[str, Any], sentence: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=sentence):
        generate(llm, [[70, 71]], params(8, **options))


def test_grammars_do_not_depend_on_drafts(llm: Any) -> None:
    same_for_any_drafts(llm, [{"dllm_block_length": n} for n in (1, 3, 8)])


def test_text_under_a_grammar_is_that_of_causal_decoding(llm: Any) -> None:
    prompt = letters(9, 4)
    [output] = generate(llm, [prompt], wish_grammar("regex", "[a-z]{12}", 20))
    text = list(prompt)
    for _ in range(12):
        row = model().predictions([*text, 0], list(range(len(text) + 1)))[len(text)]
        text.append(LETTERS[int(row[LETTERS].argmax())])
    assert token_ids(output)[:-1] == text[len(prompt) :]
    assert output.outputs[0].finish_reason == "stop"


def test_grammars_after_preemption(llm: Any) -> None:
    """Checks follow the canvas that workers keep, or a new first token."""
    engine, before = llm.llm_engine, num_preemptions(llm)
    if engine.vllm_config.scheduler_config.async_scheduling:
        pytest.skip("vLLM preempts nobody in the middle of an asynchronous step")
    hot = {"temperature": 1.0, "dllm_block_length": 3}
    wishes = [
        wish_grammar("regex", "[a-z ]{9,30}", 40, seed=i, **hot) for i in range(5)
    ]
    prompts = [letters(7 + i, i) for i in range(5)]
    expected = [token_ids(output) for output in generate(llm, prompts, wishes)]
    for i, (prompt, one) in enumerate(zip(prompts, wishes, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, one)
    step, done = 0, {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: token_ids(o) for o in engine.step() if o.finished}
        step += 1
        if step in (2, 5, 9):
            assert llm.reset_prefix_cache(reset_running_requests=True)
    assert [done[str(i)] for i in range(5)] == expected
    assert num_preemptions(llm) > before


def test_an_automaton_is_refused(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    asked = wish_grammar("regex", "[a-z]+", 8, dllm_grammar="automaton")
    with pytest.raises(VLLMValidationError, match="ask for 'drafts'"):
        generate(llm, [[70, 71]], asked)
