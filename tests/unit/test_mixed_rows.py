"""What one request asks for is done for its rows alone, and changes nobody's tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from scripted import DEVICE, Loop, sampling
from scripted_rows import Hashed
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.kernels.confidence import reference
from dllm_plugin.sampling.features.logprobs import LogprobStash
from dllm_plugin.sampling.rows import RowChunk

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
BLOCK: dict[str, Any] = {
    "strategy": "block_diffusion",
    "block_length": 4,
    "canvas_length": 8,
}
DREAM = {"strategy": "d2f", "block_length": 4, "canvas_length": 16, "dllm_top_p": 0.9}


def worded(max_tokens: int) -> SamplingParams:
    params = sampling(max_tokens, None)
    params._bad_words_token_ids = [[4, 5], [2, 3, 1]]
    return params


KINDS: dict[str, Callable[[int], SamplingParams]] = {
    "top_p": lambda n: sampling(n, None, temperature=0.9, seed=1, top_p=0.8),
    "top_k": lambda n: sampling(n, None, temperature=0.9, seed=2, top_k=3),
    "min_p": lambda n: sampling(n, None, temperature=0.9, seed=3, min_p=0.1),
    "bad_words": worded,
    "logprobs": lambda n: sampling(n, None, logprobs=3),
    "sampled logprobs": lambda n: sampling(
        n, None, temperature=0.9, seed=4, logprobs=0
    ),
}
GREEDY = 7


class Read(NamedTuple):
    """What a step read in one way: which slots, and how many rows."""

    way: str
    slots: set[int]
    rows: int


def watch(loop: Loop) -> list[Read]:
    """Note every read of logits: once, from copies, scored."""
    seen: list[Read] = []
    proposer = loop.sampler.proposer
    owners: dict[str, Any] = {
        "_from_logits": proposer,
        "_from_copies": proposer,
        "score": loop.sampler.features[LogprobStash],
    }
    for name, owner in owners.items():
        plain = getattr(owner, name)

        def noted(first: Any, *rest: Any, name: str = name, plain: Any = plain) -> Any:
            if isinstance(first, RowChunk):
                seen.append(Read(name, set(first.slot_T.tolist()), len(first.rows_T)))
            else:
                seen.append(Read(name, set(), len(first)))
            return plain(first, *rest)

        setattr(owner, name, noted)
    return seen


def start_greedy(loop: Loop) -> list[Any]:
    return [
        loop.start([i % 13] * (1 + i % 4), Hashed(i), sampling(20, None), f"plain-{i}")
        for i in range(GREEDY)
    ]


def outcome(run: Any) -> Any:
    return run.output, run.passes


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize("dllm", [D2F, BLOCK], ids=["d2f", "block"])
def test_nobody_asks(dllm: dict[str, Any], shift: bool) -> None:
    """No copy, no score, no column of log-probabilities, and no owner of a row on the host."""
    loop = Loop(dllm, shift)
    seen = watch(loop)
    start_greedy(loop)
    loop.run()
    assert {read.way for read in seen} == {"_from_logits"}
    assert loop.sampler.features[LogprobStash].tables is None
    assert not loop.sampler.rows._mixed


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_asks(kind: str, shift: bool) -> None:
    for dllm in (D2F, BLOCK):
        alone = Loop(dllm, shift)
        plain = start_greedy(alone)
        alone.run()
        single = Loop(dllm, shift)
        wish = single.start([3, 4], Hashed(50), KINDS[kind](20), "asks")
        single.run()

        loop = Loop(dllm, shift)
        seen = watch(loop)
        asks = loop.start([3, 4], Hashed(50), KINDS[kind](20), "asks")
        slot = asks.slot
        beside = start_greedy(loop)
        loop.run()
        assert list(map(outcome, beside)) == list(map(outcome, plain))
        assert outcome(asks) == outcome(wish)
        copied = [read for read in seen if read.way == "_from_copies"]
        assert set().union(*(read.slots for read in copied)) == {slot}
        assert all(
            slot not in read.slots for read in seen if read.way == "_from_logits"
        )
        assert any(read.way == "score" for read in seen) == ("logprobs" in kind)


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_all_kinds_together(shift: bool) -> None:
    """As each alone; what is scored are the rows of those that want log-probabilities."""
    expected = []
    for i, kind in enumerate(KINDS):
        single = Loop(D2F, shift)
        run = single.start([3, 4], Hashed(50 + i), KINDS[kind](20), kind)
        single.run()
        expected.append(outcome(run))
    loop = Loop(D2F, shift)
    seen = watch(loop)
    runs = [
        loop.start([3, 4], Hashed(50 + i), KINDS[kind](20), kind)
        for i, kind in enumerate(KINDS)
    ]
    wanting = {run.slot for run in runs if "logprobs" in run.req_id}
    rows = loop.sampler.features[LogprobStash]
    loop.run()
    assert list(map(outcome, runs)) == expected
    for read, after in zip(seen, seen[1:], strict=False):
        if after.way == "score":
            assert read.way == "_from_copies" and read.slots <= wanting
            assert read.rows == after.rows
    assert rows.tables is not None


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the reference implementation runs on CPUs"
)
def test_one_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers are drawn for its rows alone, which are read with the others'."""
    alone = Loop(BLOCK)
    plain = start_greedy(alone)
    alone.run()
    drawn: list[int] = []
    draw = reference.gumbel_uniform

    def noted(seed_T: Tensor, *rest: Any) -> Tensor:
        drawn.append(len(seed_T))
        return draw(seed_T, *rest)

    monkeypatch.setattr(reference, "gumbel_uniform", noted)
    loop = Loop(BLOCK)
    loop.start([3, 4], Hashed(50), sampling(20, None, temperature=0.9, seed=1), "asks")
    beside = start_greedy(loop)
    loop.run()
    assert list(map(outcome, beside)) == list(map(outcome, plain))
    assert drawn and max(drawn) <= BLOCK["canvas_length"]


def test_logprobs_of_one_are_rows_of_one() -> None:
    """What is copied to the host does not grow with the neighbours."""
    loop = Loop(BLOCK)
    start_greedy(loop)
    loop.start([3, 4], Hashed(50), KINDS["logprobs"](20), "asks")
    loop.step()
    output = loop.step()
    assert output.logprobs_tensors is not None
    assert output.logprobs_tensors.logprobs.shape == (8, 4)
    assert len(output.logprobs_tensors.cu_num_generated_tokens) == GREEDY + 2
