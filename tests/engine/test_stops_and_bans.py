"""What restricts or ends a text: biases, bans, stop tokens, stop strings, limits."""

from typing import Any

from engines import LETTERS, generate, letters, params, token_ids

EOS = {"llada": 257, "dream": 256}
PROMPT = letters(20, 2)


def one(llm: Any, max_tokens: int, **options: Any) -> Any:
    """The completion of one request."""
    shape = {"dllm_block_length": 16, "dllm_threshold": 0.3}
    [output] = generate(llm, [PROMPT], params(max_tokens, **shape | options))
    return output.outputs[0]


def test_logit_bias_forces_and_bans(family: str, llm: Any) -> None:
    free = list(one(llm, 40).token_ids)
    assert list(one(llm, 40, logit_bias={65: 100}).token_ids) == [65] * 40
    common = max(set(free), key=free.count)
    assert common not in one(llm, 40, logit_bias={common: -100}).token_ids


def test_allowed_token_ids(family: str, llm: Any) -> None:
    for options in ({}, {"temperature": 1.5, "seed": 3}):
        completion = one(llm, 40, allowed_token_ids=LETTERS, **options)
        assert set(completion.token_ids) <= set(LETTERS)
        assert len(completion.text) == 40


def test_bad_words_never_appear(family: str, overlapped: bool, llm: Any) -> None:
    letters = {"allowed_token_ids": LETTERS}
    for options in ({}, {"temperature": 2.0, "seed": 3}):
        banned: list[str] = []
        text = one(llm, 60, **letters, **options).text
        for start, size in ((0, 1), (5, 2), (20, 2), (31, 3), (15, 2), (47, 4)):
            banned.append(text[start : start + size])
            text = one(llm, 60, **letters, **options, bad_words=banned).text
            assert not [word for word in banned if word in text], banned
            assert len(text) == 60


def test_bad_words_in_a_batch_with_others(family: str, llm: Any) -> None:
    shape = {
        "dllm_block_length": 16,
        "dllm_threshold": 0.3,
        "allowed_token_ids": LETTERS,
    }
    free = params(60, **shape)
    [output] = generate(llm, [PROMPT], free)
    words = [output.outputs[0].text[10:12]]
    banned = params(60, bad_words=words, **shape)
    [lonely] = generate(llm, [PROMPT], banned)
    outputs = generate(llm, [PROMPT] * 3, [free, banned, free])
    assert [token_ids(o) for o in outputs] == [
        token_ids(output),
        token_ids(lonely),
        token_ids(output),
    ]
    assert words[0] not in lonely.outputs[0].text


def test_stop_token_ids_and_min_tokens(family: str, llm: Any) -> None:
    free = list(one(llm, 60).token_ids)
    stop = free[12]
    ended = one(llm, 60, stop_token_ids=[stop])
    assert list(ended.token_ids).index(stop) == len(ended.token_ids) - 1 <= 12
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    for least in (13, 14, 30):
        later = list(one(llm, 60, stop_token_ids=[stop], min_tokens=least).token_ids)
        assert len(later) >= least
        assert stop not in later[:-1]


def test_eos_ends_unless_ignored(family: str, llm: Any) -> None:
    """S19: ignored, it is a token like any other."""
    eos = EOS[family]
    wanted = {"logit_bias": {eos: 100}}
    ended = one(llm, 40, ignore_eos=False, **wanted)
    assert (list(ended.token_ids), ended.finish_reason) == ([eos], "stop")
    later = one(llm, 40, ignore_eos=False, min_tokens=10, **wanted)
    assert len(later.token_ids) == 11
    assert list(later.token_ids).count(eos) == 1
    whole = one(llm, 40, ignore_eos=True, **wanted)
    assert (list(whole.token_ids), whole.finish_reason) == ([eos] * 40, "length")


def test_stop_strings(family: str, overlapped: bool, llm: Any) -> None:
    """S21: the text is cut at the string's first end in reading order, however it was decoded."""
    letters = {"allowed_token_ids": LETTERS, "temperature": 2.0, "seed": 5}
    text = one(llm, 80, **letters).text
    for start, size in ((0, 1), (14, 3), (15, 2), (40, 4), (70, 6)):
        stop = text[start : start + size]
        cut = text.index(stop)
        completion = one(llm, 80, stop=[stop], **letters)
        assert (completion.text, completion.finish_reason) == (text[:cut], "stop")
        assert completion.stop_reason == stop
        kept = one(llm, 80, stop=[stop], include_stop_str_in_output=True, **letters)
        assert kept.text == text[: cut + size]
    missing = one(llm, 80, stop=["0"], **letters)
    assert (missing.text, missing.finish_reason) == (text, "length")


def test_without_detokenization(family: str, llm: Any) -> None:
    with_text, without = one(llm, 30), one(llm, 30, detokenize=False)
    assert without.text == ""
    assert list(without.token_ids) == list(with_text.token_ids)
