"""Random sampling on a canvas: seeds, filters, and the distribution itself."""

from collections import Counter
from typing import Any

import torch
from engines import (
    EngineRoom,
    a_prompt,
    generate,
    num_preemptions,
    params,
    results,
    token_ids,
)
from jobs import d2f_rules, plain_model

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.text import Text

TIGHT: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 14}
PROMPTS = [a_prompt(length, length) for length in (3, 20, 33, 40, 60, 64)]


def seeded(i: int, **options: Any) -> Any:
    filters: list[Any] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}]
    shape = {
        "temperature": 0.8,
        "seed": i,
        "dllm_block_length": 16,
        "dllm_threshold": 0.5,
    }
    return params(90, **shape | filters[i % 4] | options)


def test_a_seed_gives_one_text(
    family: str, overlapped: bool, llm: Any, room: EngineRoom
) -> None:
    """Alone, in a batch, in a batch in another order, and after preemption."""
    wishes = [seeded(i) for i in range(len(PROMPTS))]
    alone = [
        results(generate(llm, [p], w))[0]
        for p, w in zip(PROMPTS[:3], wishes[:3], strict=True)
    ]
    together = results(generate(llm, PROMPTS, wishes))
    assert together[:3] == alone
    assert results(generate(llm, PROMPTS[::-1], wishes[::-1])) == together[::-1]
    tight = room.start(family, async_scheduling=overlapped, **TIGHT)
    before = num_preemptions(tight)
    assert results(generate(tight, PROMPTS, wishes)) == together
    assert num_preemptions(tight) > before


def test_other_seeds_give_other_texts(family: str, llm: Any) -> None:
    wishes = [params(30, temperature=1.0, seed=seed) for seed in range(8)]
    texts = {tuple(token_ids(o)) for o in generate(llm, [PROMPTS[1]] * 8, wishes)}
    assert len(texts) == 8


def test_n_completions_of_one_seed(family: str, llm: Any) -> None:
    [many] = generate(llm, [PROMPTS[1]], seeded(7, n=3))
    singles = generate(llm, [PROMPTS[1]] * 3, [seeded(7, seed=7 + k) for k in range(3)])
    assert [list(c.token_ids) for c in many.outputs] == [token_ids(o) for o in singles]
    assert len({tuple(c.token_ids) for c in many.outputs}) == 3


def test_one_candidate_is_certain(family: str, llm: Any) -> None:
    """S18: confidence is read after the filters, so every masked position is taken at once."""
    model, rules = plain_model(family), d2f_rules(16, threshold=-1.0)
    text = decode(Text(model, PROMPTS[2], 64, rules))
    for only_one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        wish = params(64, temperature=0.7, seed=1, dllm_block_length=16, **only_one)
        [got] = results(generate(llm, [PROMPTS[2]], wish))
        assert got == text, only_one


def test_temperature_zero_ignores_the_filters(family: str, llm: Any) -> None:
    plain, filtered = (
        params(64, dllm_block_length=16, **options)
        for options in ({}, {"top_k": 5, "seed": 4})
    )
    first, second = results(generate(llm, [PROMPTS[2]] * 2, [plain, filtered]))
    assert first == second


def test_draws_follow_the_distribution(family: str, llm: Any) -> None:
    """First tokens over many seeds against the softmax of the plain model's logits."""
    temperature, draws = 2.0, 400
    prompt, model = PROMPTS[0], plain_model(family)
    wishes = [
        params(1, temperature=temperature, seed=seed, dllm_block_length=1)
        for seed in range(draws)
    ]
    seen = Counter(token_ids(o)[0] for o in generate(llm, [prompt] * draws, wishes))
    block = [0] * len(prompt) + [1]
    logits = model.predictions([*prompt, model.mask_id], block)[-1] / temperature
    logits[model.mask_id] = float("-inf")
    probs = logits.softmax(-1)
    for token in probs.topk(5).indices.tolist():
        wanted, spread = (
            draws * probs[token],
            (draws * probs[token] * (1 - probs[token])) ** 0.5,
        )
        assert abs(seen[token] - wanted) < 4 * spread, token


def test_logprobs_are_those_of_the_unmasking_step(
    family: str, overlapped: bool, llm: Any
) -> None:
    model = plain_model(family)
    texts = [Text(model, p, 50, d2f_rules(16, threshold=0.5)) for p in PROMPTS]
    for text in texts:
        decode(text)
    shape = {"dllm_block_length": 16, "dllm_threshold": 0.5}
    wishes = [params(50, logprobs=k, **shape) for k in (5, None, 0, 1, 20, None)]
    outputs = generate(llm, PROMPTS, wishes)
    for text, output, wish in zip(texts, outputs, wishes, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == text.answer()
        if wish.logprobs is None:
            assert completion.logprobs is None
            continue
        raw = torch.stack(
            [text.raw[len(text.prompt) + i] for i in range(50)]
        ).log_softmax(-1)
        own = raw.gather(1, torch.tensor(text.answer())[:, None]).squeeze(1)
        assert len(completion.logprobs) == 50
        assert abs(completion.cumulative_logprob - float(own.sum())) < 1e-2
        for token, row, entry in zip(
            text.answer(), raw, completion.logprobs, strict=True
        ):
            assert abs(entry[token].logprob - float(row[token])) < 1e-3
            assert entry[token].rank == 1 + int((row > row[token]).sum())
            best = row.topk(wish.logprobs)
            assert set(entry) == {token, *best.indices.tolist()}
            for index, value in zip(
                best.indices.tolist(), best.values.tolist(), strict=True
            ):
                assert abs(entry[index].logprob - value) < 1e-3


def test_logprobs_survive_preemption(family: str, llm: Any, room: EngineRoom) -> None:
    wishes = [seeded(i, logprobs=2) for i in range(len(PROMPTS))]
    undisturbed = generate(llm, PROMPTS, wishes)
    tight = room.start(family, **TIGHT)
    before = num_preemptions(tight)
    disturbed = generate(tight, PROMPTS, wishes)
    assert num_preemptions(tight) > before
    for first, second in zip(undisturbed, disturbed, strict=True):
        assert token_ids(first) == token_ids(second)
        pairs = zip(first.outputs[0].logprobs, second.outputs[0].logprobs, strict=True)
        for entry, again in pairs:
            assert set(entry) == set(again)
            assert all(abs(entry[i].logprob - again[i].logprob) < 1e-3 for i in entry)
