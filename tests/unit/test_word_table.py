"""Bad words cost what the requests that have them cost, however many tokens they hold."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted import DEVICE, Loop, sampling
from scripted_rows import Hashed
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.memory import bad_word_bytes
from dllm_plugin.config.request.arguments import MAX_WORD_TOKENS, MAX_WORDS_TOKENS
from dllm_plugin.config.request.checks import check_bad_words
from dllm_plugin.sampling.features import bad_words
from dllm_plugin.sampling.features import bad_words as word_table
from dllm_plugin.sampling.features.bad_words import UNUSED, BadWords, WordTable

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
LONGEST = MAX_WORDS_TOKENS // MAX_WORD_TOKENS  # words of the most tokens


def worded(words: list[list[int]], max_tokens: int = 16) -> SamplingParams:
    params = sampling(max_tokens, None)
    params._bad_words_token_ids = words
    return params


def most(seed: int) -> list[list[int]]:
    """As many tokens of words as one request may have."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 14, (LONGEST, MAX_WORD_TOKENS)).tolist()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what the table sends to the device."""
    shapes: list[tuple[int, ...]] = []
    plain = word_table.async_tensor_h2d

    def noted(data: Any, **options: Any) -> Any:
        shapes.append(np.shape(data))
        return plain(data, **options)

    monkeypatch.setattr(word_table, "async_tensor_h2d", noted)
    return shapes


def test_limits_of_a_request() -> None:
    check_bad_words([[1] * MAX_WORD_TOKENS] * LONGEST + [[1]] * 5000)
    check_bad_words([[1, 2]] * (MAX_WORDS_TOKENS // 2))
    with pytest.raises(VLLMValidationError, match="a word of 17 tokens; at most 16 "):
        check_bad_words([[1], [1] * 17])
    with pytest.raises(
        VLLMValidationError, match="65 words of up to 16 tokens.* 1024 at"
    ):
        check_bad_words([[1, 2]] * 64 + [[1] * 16])


def test_words_come_and_go(sent: list[tuple[int, ...]]) -> None:
    """Rows of new requests alone are sent, and the table goes with the last request."""
    table = WordTable(64, DEVICE)
    table.add(3, [])
    table.apply_staged_writes()
    assert table.tokens_NX is None and not sent
    table.add(3, [[1, 2], [4, 5, 6]])
    table.apply_staged_writes()
    assert sent == [(1,), (1, MAX_WORDS_TOKENS)]
    table.add(4, [])
    table.apply_staged_writes()
    assert len(sent) == 2
    table.add(9, [[7, 8]])
    table.apply_staged_writes()
    assert sent[2:] == [(1,), (1, MAX_WORDS_TOKENS)]
    slots = np.array([3, 9])
    words = table.words_of(torch.from_numpy(slots).to(DEVICE), slots)
    assert words.tolist() == [
        [[1, 2, UNUSED], [4, 5, 6]],
        [[7, 8, UNUSED], [UNUSED, UNUSED, UNUSED]],
    ]
    table.remove(3)
    assert table.tokens_NX is not None
    table.remove(9)
    assert table.tokens_NX is None and not table.count_np.any()


def test_the_table_goes_with_the_last_request() -> None:
    loop = Loop(D2F)
    table = loop.sampler.features[BadWords].table
    first = loop.start([1] * 4, Hashed(1), worded(most(1), 4), "first")
    second = loop.start([2] * 4, Hashed(2), worded([[3, 4]], 16), "second")
    plain = loop.start([3] * 4, Hashed(3), sampling(40, None), "plain")
    while not first.done:
        loop.step()
    assert table.tokens_NX is not None and not second.done
    loop.preempt(second)
    assert table.tokens_NX is None
    loop.resume(second)
    assert table.tokens_NX is not None
    while not second.done:
        loop.step()
    assert table.tokens_NX is None and not plain.done
    loop.run()


class Largest(TorchDispatchMode):
    """Notes how large the largest tensor is that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                storage = made.untyped_storage()
                self.size = max(
                    self.size, storage.nbytes() // (made.element_size() or 1)
                )
        return result


def test_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with many words are aligned in groups, with the same result."""
    at_once = 2 * MAX_WORDS_TOKENS * (16 + MAX_WORD_TOKENS - 1)
    outcomes, sizes = [], []
    for limit in (1 << 40, at_once):
        monkeypatch.setattr(bad_words, "ALIGNED_AT_ONCE", limit)
        loop = Loop(D2F, slots=8)
        runs = [
            loop.start(
                [i] * 3, Hashed(i), worded([*most(i), [i, 5], [5, i]][2:]), f"{i}"
            )
            for i in range(8)
        ]
        with Largest() as largest:
            loop.run()
        outcomes.append([(run.output, run.passes) for run in runs])
        sizes.append(largest.size)
    assert outcomes[0] == outcomes[1]
    assert sizes[1] <= at_once < sizes[0]
    assert all(
        not any(run[i : i + 2] in ([k, 5], [5, k]) for i in range(15))
        for k, (run, _) in enumerate(outcomes[1])
    )


def test_what_the_memory_profile_is_shown() -> None:
    """As much as a step of all slots makes at once, each with as many words as it may have."""
    loop = Loop(D2F, slots=8)
    shown = bad_word_bytes(loop.sampler.size)
    for i in range(8):
        loop.start([i] * 3, Hashed(i), worded(most(i)), f"{i}")
    loop.step()
    loop.step()
    made = loop.sampler.features[BadWords]._banned
    assert 0 < sum(t.nbytes for pair in made for t in pair) < shown
