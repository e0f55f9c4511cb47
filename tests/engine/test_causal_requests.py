"""What any request may ask for, of the families whose texts are stored by causal forwards."""

from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any, NamedTuple

import pytest
from engines import (
    EngineRoom,
    forwards,
    generate,
    letters,
    params,
    streamed,
    token_ids,
)
from grammar_requests import wish
from test_watched import check_frames

pytestmark = pytest.mark.slow

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("nemotron", {"strategy": "block_diffusion", "block_length": 8}),
    "self_speculation": ("nemotron", {"strategy": "self_speculation"}),
    "introspective": ("idlm", {"block_length": 8}),
    "causal_window": ("wedlm", {}),
    "llada2.2": ("llada2.2", {}),
}
HOT = {"temperature": 0.9, "seed": 20}


class Served(NamedTuple):
    """An engine, the ids of its letters, and a prompt of letters."""

    family: str
    llm: Any
    letters: list[int]
    prompt: list[int]

    @property
    def moves_tokens(self) -> bool:
        """Return whether edits move tokens that were decided."""
        return self.family == "llada2.2"


@pytest.fixture(params=list(ENGINES), scope="module")
def served(request: pytest.FixtureRequest, room: EngineRoom) -> Iterator[Served]:
    family, dllm = ENGINES[request.param]
    llm = room.start(family, dllm, True)
    ids = llm.get_tokenizer().convert_tokens_to_ids(list(ascii_lowercase))
    prompt = [ids[letter - 64] for letter in letters(15, 4)]
    yield Served(family, llm, ids, prompt)


def test_frames_alter_no_text(served: Served) -> None:
    check_frames(served.llm)


def test_several_texts_have_seeds_that_count_up(served: Served) -> None:
    llm, prompt = served.llm, served.prompt
    [many] = generate(llm, [prompt], params(30, n=3, **HOT))
    for i, completion in enumerate(many.outputs):
        [single] = generate(llm, [prompt], params(30, **HOT | {"seed": 20 + i}))
        assert list(completion.token_ids) == token_ids(single)


def test_rules_hold_for_every_token(served: Served) -> None:
    """Beside each other as alone; LLaDA2.2, whose tokens move, refuses some by name."""
    llm, some, prompt = served.llm, served.letters, served.prompt
    a, b, *_ = some
    ends = {"stop_token_ids": some[:9], "ignore_eos": False}
    wishes = [
        params(30, allowed_token_ids=some, **HOT),
        params(30, logit_bias={a: 60, b: 59}, min_p=0.1, **HOT),
        params(30, presence_penalty=1.0, frequency_penalty=0.5, logprobs=1, **ends),
    ]
    if not served.moves_tokens:
        wishes += [
            params(30, stop_token_ids=some, min_tokens=29, dllm_trace=1),
            params(30, frequency_penalty=0.5, bad_words=["a", "b"]),
        ]
    together = generate(llm, [prompt] * len(wishes), wishes)
    for one, output in zip(wishes, together, strict=True):
        # Lengths of drafts follow the load, so forwards may differ.
        [alone] = generate(llm, [prompt], one)
        assert token_ids(alone) == token_ids(output)
    assert set(token_ids(together[0])) <= set(some)
    assert set(token_ids(together[1])) <= {a, b}
    assert not set(token_ids(together[2])[:-1]) & set(some[:9])
    if not served.moves_tokens:
        assert len(together[3].outputs[0].routed_experts) >= 29
        assert not {a, b} & set(token_ids(together[4]))


def test_a_grammar_that_drafts_fit_costs_no_forwards(served: Served) -> None:
    """Nor does it change the text; under one no token of LLaDA2.2 moves."""
    if served.moves_tokens:
        pytest.skip("another loop")
    asked: dict[str, Any] = {"logit_bias": dict.fromkeys(served.letters, 80.0)}
    free, held = generate(
        served.llm,
        [served.prompt] * 2,
        [params(40, **asked), wish("regex", "[a-z]{60}", 40, **asked)],
    )
    assert token_ids(free) == token_ids(held)
    assert forwards(held) <= forwards(free) + 2


def test_requests_of_any_length_share_pages(served: Served) -> None:
    """What a prompt stores is causal: plain causal requests and drafts find each other's pages."""
    if served.family != "nemotron":
        pytest.skip("test_introspective.py and test_causal_window.py show it")
    ids = [served.letters[letter - 64] for letter in letters(70, 6)]
    wishes = [params(40, dllm_block_length=length) for length in (1, 8, 4)]
    plain, *others = [generate(served.llm, [ids], one)[0] for one in wishes]
    assert plain.num_cached_tokens == 0
    for output in others:
        assert output.num_cached_tokens == 64
    [after] = generate(served.llm, [ids + token_ids(others[0])], params(8))
    assert after.num_cached_tokens >= 96


def test_text_is_never_taken_back(served: Served) -> None:
    """Nor does a stop string end it elsewhere than in the whole text."""
    llm, prompt = served.llm, served.prompt
    rules = {"allowed_token_ids": served.letters}
    [free] = generate(llm, [prompt], params(40, **rules))
    text = free.outputs[0].text
    stop = text[11:13]
    assert stop
    one = params(40, **rules, stop=[stop])
    assert streamed(llm, prompt, one) == text[: text.index(stop)]
