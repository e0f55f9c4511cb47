"""Check stop tokens, min_tokens, biases, allowed ids and bad words under decoding in any order."""

from typing import Any

import numpy as np
import pytest
from scripted import Loop, Run, sampling
from scripted_rows import EOS, MASK, VOCAB, Hashed, Script, Table
from vllm.sampling_params import SamplingParams

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
BLOCK = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}


def count(q: int) -> int:
    return q % 13


SURE = Table(count, lambda q: 0.99)  # everything of an open block is taken at once


def worded(words: list[list[int]], max_tokens: int, **options: Any) -> SamplingParams:
    """Return parameters with bad words, already tokenised as vLLM's front end does it."""
    params = sampling(max_tokens, None, **options)
    params._bad_words_token_ids = words
    return params


def decode(
    params: SamplingParams,
    script: Script = SURE,
    prompt: list[int] | None = None,
    dllm: dict[str, Any] = D2F,
) -> Run:
    loop = Loop(dllm)
    run = loop.start(prompt or [1] * 4, script, params)
    loop.run(limit=200)
    return run


def holds(text: list[int], word: list[int]) -> bool:
    return any(text[i : i + len(word)] == word for i in range(len(text)))


def test_bad_word_of_one_token() -> None:
    run = decode(worded([[5], [7]], 8))
    assert run.output == [4, 0, 6, 0, 8, 9, 10, 11]  # the next best; all others tie


def test_bad_word_completed_in_one_step() -> None:
    """Its last position waits a step, in which the token is banned."""
    run = decode(worded([[5, 6]], 4))
    assert [p.accepted for p in run.passes] == [[(4, 4), (5, 5), (7, 7)], [(6, 0)]]
    assert decode(worded([[4, 5], [6, 7]], 4)).output == [4, 0, 6, 0]
    assert decode(worded([[4, 5, 6, 7]], 4)).output == [4, 5, 6, 0]


def test_overlapping_bad_words() -> None:
    run = decode(worded([[4, 5], [5, 6]], 4))
    assert not holds(run.output, [4, 5]) and not holds(run.output, [5, 6])
    run = decode(worded([[3, 3], [3, 0]], 6), Table(lambda q: 3, lambda q: 0.99))
    assert not holds(run.output, [3, 3]) and not holds(run.output, [3, 0])


def test_bad_word_completed_out_of_order() -> None:
    """The token that would be decided last is banned, here the first of the word."""
    script = Table(count, lambda q: 0.99 if q == 6 else 0.5)
    run = decode(worded([[5, 6]], 4), script)
    assert run.passes[0].accepted == [(6, 6)]
    assert run.output == [4, 0, 6, 7]


def test_bad_word_across_the_commit_border() -> None:
    for dllm in (D2F, BLOCK):
        run = decode(worded([[7, 8]], 8), dllm=dllm)
        assert run.output == [4, 5, 6, 7, 0, 9, 10, 11]
        run = decode(worded([[6, 7, 8, 9]], 8), dllm=dllm)
        assert run.output == [4, 5, 6, 7, 8, 0, 10, 11]


def test_bad_word_that_begins_in_the_prompt() -> None:
    assert decode(worded([[3, 4]], 4), prompt=[1, 2, 9, 3]).output == [0, 5, 6, 7]
    assert decode(worded([[9, 3, 4, 5]], 4), prompt=[1, 2, 9, 3]).output == [4, 0, 6, 7]
    assert decode(worded([[2, 4]], 4), prompt=[1, 2, 9, 3]).output == [4, 5, 6, 7]


def test_bad_word_beyond_the_limit_is_no_word() -> None:
    """A last block is decoded whole, but what is trimmed off does not count as text."""
    assert decode(worded([[6, 7]], 3)).output == [4, 5, 6]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dllm", [D2F, BLOCK], ids=["d2f", "block_diffusion"])
def test_bad_words_fuzz(dllm: dict[str, Any], shift: bool) -> None:
    """No word in the text, no hole in it, and neighbours without words decode as alone."""
    rng, loop, wordy, plain = (
        np.random.default_rng(4),
        Loop(dllm, shift, slots=40),
        [],
        [],
    )
    for seed in range(20):
        words = [rng.integers(0, 14, rng.integers(1, 5)).tolist() for _ in range(14)]
        words += [rng.integers(0, 14, 2).tolist() for _ in range(20)]
        words = [w for w in words if len(w) > 1 or w[0] > 8]
        options = {
            "dllm_block_length": int(rng.choice([1, 2, 4])),
            "dllm_threshold": 0.6,
        }
        prompt = rng.integers(0, 14, rng.integers(1, 6)).tolist()
        params = worded(words, 24, **options)
        wordy.append(
            (words, loop.start(prompt, Hashed(seed), params, req_id=f"w{seed}"))
        )
        params = sampling(24, None, **options)
        plain.append(loop.start(prompt, Hashed(seed), params, req_id=f"p{seed}"))
    loop.run()
    changed = 0
    for (words, run), free in zip(wordy, plain, strict=True):
        assert len(run.output) == 24 and MASK not in run.output
        for word in words:
            tail = (run.prompt + run.output)[-24 - len(word) + 1 :]
            assert not holds(tail, word)
        changed += run.output != free.output
    assert changed > 15
    for free in plain[
        ::4
    ]:  # alone, one takes about as many steps as all of them together
        alone = Loop(dllm, shift)
        again = alone.start(
            free.prompt, free.script, sampling(24, None, **free.params.extra_args)
        )
        alone.run()
        assert again.output == free.output


def test_min_tokens_ban_every_stop_token() -> None:
    params = sampling(16, min_tokens=5, stop_token_ids=[3])
    stopping = Table(lambda q: EOS if q % 2 else 3, lambda q: 0.99)
    run = decode(params, stopping)
    assert run.output == [0] * 5 + [EOS]


def test_min_tokens_count_positions_not_steps() -> None:
    """A stop token may be decided early where it is allowed, and ends the text when reached."""
    script = Table(lambda q: EOS, lambda q: 0.99 if q >= 10 else 0.3)
    run = decode(sampling(16, min_tokens=6, dllm_block_add_threshold=0.0), script)
    assert run.output[-1] == EOS and run.output.index(EOS) == 6


def test_min_tokens_ban_an_eos_that_is_ignored() -> None:
    """As in vLLM: `ignore_eos` keeps EOS from ending the request, not from being banned early."""
    params = sampling(8, None, min_tokens=2)
    params._all_stop_token_ids = {EOS}
    script = Table(lambda q: EOS, lambda q: 0.99)
    output = decode(params, script).output
    assert EOS not in output[:2] and output[2:] == [EOS] * 6


def test_min_tokens_with_a_stop_token_outside_the_vocabulary() -> None:
    """Accepted by vLLM's front end, so it must not bring the engine down."""
    run = decode(sampling(4, None, min_tokens=2, stop_token_ids=[VOCAB + 5]))
    assert run.output == [4, 5, 6, 7]


def test_allowed_token_ids() -> None:
    run = decode(sampling(12, None, allowed_token_ids=[2, 5, 9]))
    assert set(run.output) <= {2, 5, 9} and run.output[1] == 5


def test_logit_bias() -> None:
    assert decode(sampling(4, None, logit_bias={9: 100.0})).output == [9] * 4
    assert decode(sampling(4, None, logit_bias={5: -100.0, 8: 1.0})).output == [
        4,
        8,
        6,
        7,
    ]
    assert decode(sampling(4, None, logit_bias={MASK: 100.0})).output == [4, 5, 6, 7]


def test_allowed_ids_bias_and_bad_words_together() -> None:
    params = sampling(
        4, None, allowed_token_ids=[5, 6, 7], logit_bias={6: 50.0, 9: 100.0}
    )
    params._bad_words_token_ids = [[7], [6, 6]]
    run = decode(params)
    assert set(run.output) == {5, 6} and not holds(run.output, [6, 6])


@pytest.mark.parametrize("where", range(4, 12))
def test_stop_token_anywhere(where: int) -> None:
    """The text ends with it, whichever block it is in; what follows is never emitted."""
    script = Table(
        lambda q: EOS if q == where else count(q), lambda q: 0.99 if q > 6 else 0.5
    )
    run = decode(sampling(8), script)
    assert run.output == [count(q) for q in range(4, where)] + [EOS]


def test_many_stop_tokens_and_few() -> None:
    """The table of stop tokens grows without forgetting those of running requests."""
    loop = Loop(D2F)
    few = loop.start([1] * 4, SURE, sampling(12, stop_token_ids=[9]), req_id="few")
    loop.step()
    many = list(range(100, 130)) + [10]
    others = loop.start([1] * 4, SURE, sampling(12, stop_token_ids=many), req_id="many")
    loop.run()
    assert few.output == [4, 5, 6, 7, 8, 9]
    assert others.output == [4, 5, 6, 7, 8, 9, 10]


def test_rules_do_not_outlive_their_request() -> None:
    """A slot's next request knows nothing of the last one's rules."""
    loop = Loop(D2F, slots=1)
    params = worded(
        [[5], [6, 7]], 8, min_tokens=8, stop_token_ids=[9], logit_bias={4: -50.0}
    )
    loop.start([1] * 4, SURE, params, req_id="ruled")
    loop.run()
    plain = loop.start([1] * 4, SURE, sampling(8), req_id="plain")
    loop.run()
    assert plain.output == [4, 5, 6, 7, 8, 9, 10, 11]


def test_sampling_depends_only_on_the_request() -> None:
    """Seeded: the same text alone, in a batch, in another slot; another seed, another text."""
    options: dict[str, Any] = {"temperature": 1.0, "dllm_threshold": 0.6}
    texts = []
    for neighbours, seed in ((0, 7), (5, 7), (0, 8)):
        loop = Loop(D2F, slots=16)
        for i in range(neighbours):
            loop.start(
                [i + 1] * (i + 1), Hashed(i), sampling(20, temperature=i % 2, seed=i)
            )
            loop.step()
        run = loop.start([3, 4], Hashed(50), sampling(24, None, seed=seed, **options))
        loop.run()
        texts.append(run.output)
    assert texts[0] == texts[1] != texts[2]
