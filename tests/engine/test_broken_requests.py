"""Logits that are no numbers end their request with an error, and nobody else's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm.envs as envs
from engines import (
    EngineRoom,
    a_prompt,
    free_pages,
    generate,
    params,
    step_through,
    token_ids,
)

POISON = 270  # in no prompt but the broken one
SHARED = a_prompt(64, 3)  # two pages
CLEAN = [a_prompt(20, 1), SHARED + a_prompt(9, 2), a_prompt(33, 4)]
BROKEN = [*SHARED, POISON, *a_prompt(70, 5)]
WISHES = {
    "greedy": {},
    "copies": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "logprobs": {"logprobs": 2},
}


@pytest.fixture(autouse=True)
def healed(room: EngineRoom) -> Iterator[None]:
    yield
    room.close()  # its weights are not those of the checkpoint


def start(room: EngineRoom, overlapped: bool, **options: Any) -> Any:
    dllm = {"block_length": 16, "canvas_length": 32}
    return room.start(
        "sdar",
        dllm,
        overlapped,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=24,
        **options,
    )


def embedding_row(llm: Any, token: int) -> torch.Tensor:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    model: Any = executor.driver_worker.worker.model_runner.model
    return model.model.embed_tokens.weight.data[token]


def wish(**options: Any) -> Any:
    return params(40, dllm_policy="low_confidence", dllm_steps=4, **options)


def corrupted(llm: Any) -> int:
    """Requests that vLLM's own metric counts."""
    return sum(
        int(m.value) for m in llm.get_metrics() if m.name == "vllm:corrupted_requests"
    )


def run_beside(llm: Any, broken: Any) -> tuple[Any, list[list[int]]]:
    """The broken request joins while others decode; its outcome, and the texts of the others."""
    arrivals = {
        0: [("a", CLEAN[0], wish())],
        1: [("b", CLEAN[2], wish()), ("x", BROKEN, broken)],
    }
    done = step_through(llm, arrivals | {3: [("c", CLEAN[1], wish())]})
    [x] = [done[i] for i in done if i.startswith("x")]
    others = [token_ids(done[name]) for name in ("a", "c", "b")]
    return x, others


def test_broken_requests_end_alone(
    overlapped: bool, room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours keep their tokens, and no page that was poisoned is ever found again."""
    if not overlapped:  # vLLM's own switches for it; the error needs neither
        envs.disable_envs_cache()
        monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    llm = start(room, overlapped)
    pages = free_pages(llm)
    plain = [token_ids(output) for output in generate(llm, CLEAN, wish())]
    [right] = generate(llm, [BROKEN], wish())
    llm.reset_prefix_cache()
    row = embedding_row(llm, POISON)
    kept = row.clone()
    for options in WISHES.values():
        row.fill_(float("nan"))
        outcome, others = run_beside(llm, wish(**options))
        assert outcome.outputs[0].finish_reason == "error"
        assert token_ids(outcome) == []
        assert others == plain
        row.copy_(kept)
        # Whatever of its pages is still there would be read now.
        [healed] = generate(llm, [BROKEN], wish())
        assert token_ids(healed) == token_ids(right)
        llm.reset_prefix_cache()
    assert free_pages(llm) == pages
    assert corrupted(llm) == (0 if overlapped else len(WISHES))


def test_a_prompt_says_so_itself(room: EngineRoom) -> None:
    """Fast-dLLM v2 decides a block's first token from the last row of the prompt."""
    llm = room.start("fast-dllm-v2", {})
    embedding_row(llm, POISON).fill_(float("nan"))
    prompt = [*a_prompt(31, 2), POISON]
    llm.llm_engine.add_request("x", {"prompt_token_ids": prompt}, params(40))
    [output] = llm.llm_engine.step()
    assert output.outputs[0].finish_reason == "error"


def test_vllm_raises_if_told_to(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.close()
    envs.disable_envs_cache()  # filled by the engines before
    monkeypatch.setenv("VLLM_RAISE_ON_LOGIT_NANS", "1")
    llm = start(room, False)
    embedding_row(llm, POISON).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="NaNs detected in logits"):
        generate(llm, [BROKEN], wish())
