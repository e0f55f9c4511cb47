"""Compare log-probabilities with the raw row that each emitted token was unmasked from."""

from typing import Any

import numpy as np
import pytest
from scripted import Loop, Run, sampling
from scripted_rows import MASK, VOCAB, Hashed, visible

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
BLOCK = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}
Rows = list[tuple[np.ndarray, np.ndarray, int]]


def decode(loop: Loop, runs: list[Run], preempt_at: int = -1) -> dict[str, Rows]:
    """Run to the end; return ids, values and rank of every emitted token, per request."""
    rows: dict[str, Rows] = {run.req_id: [] for run in runs}
    for step in range(200):
        canvases = [run for run in loop.running if run.prefilled]
        if not loop.running:
            break
        output = loop.step()
        tensors = output.logprobs_tensors
        for index, run in enumerate(canvases if tensors is not None else []):
            assert tensors is not None and tensors.cu_num_generated_tokens is not None
            first = tensors.cu_num_generated_tokens[index]
            for row in range(first, first + len(run.passes[-1].emitted)):
                ids, values = tensors.logprob_token_ids[row], tensors.logprobs[row]
                rank = int(tensors.selected_token_ranks[row])
                rows[run.req_id].append((ids.cpu().numpy(), values.cpu().numpy(), rank))
        if step == preempt_at and (resumed := [run for run in runs if not run.done]):
            for run in resumed:
                loop.preempt(run)
            for run in reversed(resumed):
                loop.resume(run)
    return rows


def expected(run: Run, loop: Loop) -> list[np.ndarray]:
    """Return raw log-probabilities of the row that each emitted token was unmasked from."""
    assert run.params.extra_args is not None
    length = run.params.extra_args.get("dllm_block_length", 4)
    rows: dict[int, np.ndarray] = {}
    limit = len(run.prompt) + -(-len(run.output) // length) * length
    for text, step in zip(run.texts, run.passes, strict=True):
        for position, _ in step.accepted:
            seen = visible(position - loop.shift, len(run.prompt), length, limit)
            logits = run.script(text[:seen], position).astype(np.float64)
            rows[position] = logits - np.logaddexp.reduce(logits)
    first = len(run.prompt)
    return [rows[position] for position in range(first, first + len(run.output))]


def check(run: Run, loop: Loop, rows: Rows) -> None:
    wanted = run.params.logprobs
    assert wanted is not None and len(rows) == len(run.output)
    for token, (ids, values, rank), exact in zip(
        run.output, rows, expected(run, loop), strict=True
    ):
        count = VOCAB if wanted == -1 else wanted
        assert ids[0] == token
        np.testing.assert_allclose(values[0], exact[token], rtol=1e-5, atol=1e-5)
        # Compared in float32, as the rows of the bank are.
        assert rank == (exact >= exact[token] - 1e-6).sum()
        top = np.sort(exact)[::-1][:count]
        np.testing.assert_allclose(values[1 : count + 1], top, rtol=1e-5, atol=1e-5)
        listed = exact[ids[1 : count + 1]]
        np.testing.assert_allclose(listed, top, rtol=1e-5, atol=1e-5)


def start(loop: Loop, name: str, seed: int, **options: Any) -> Run:
    params = sampling(18, None, dllm_threshold=0.6, seed=seed, **options)
    return loop.start([seed + 1] * (seed % 3 + 1), Hashed(seed), params, req_id=name)


@pytest.mark.parametrize("preempt_at", [-1, 3, 6])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dllm", [D2F, BLOCK], ids=["d2f", "block_diffusion"])
def test_logprobs_of_a_mixed_batch(
    dllm: dict[str, Any], shift: bool, preempt_at: int
) -> None:
    """None, the token's alone, some and all; preempted or not; with temperature and without."""
    loop = Loop(dllm, shift)
    runs = [
        start(loop, "none", 1),
        start(loop, "own", 2, logprobs=0),
        start(loop, "some", 3, logprobs=4, temperature=0.7),
        start(loop, "all", 4, logprobs=-1, dllm_block_length=2),
    ]
    rows = decode(loop, runs, preempt_at)
    for run in runs[1:]:
        assert MASK not in run.output
        check(run, loop, rows[run.req_id])


def test_asking_for_logprobs_changes_no_text() -> None:
    texts = []
    for logprobs in (None, 3):
        loop = Loop(D2F)
        run = start(loop, "request", 5, logprobs=logprobs)
        rows = decode(loop, [run])
        texts.append(run.output)
        assert bool(rows["request"]) == (logprobs is not None)
    assert texts[0] == texts[1]


def test_a_later_request_with_more_logprobs() -> None:
    """Steps with modest requests fill only some columns; later ones still get theirs."""
    loop = Loop(D2F)
    runs = [start(loop, "early", 6, logprobs=1)]
    rows = decode(loop, runs)
    runs = [start(loop, "wide", 7, logprobs=6), start(loop, "narrow", 8, logprobs=2)]
    rows |= decode(loop, runs)
    for run in runs:
        check(run, loop, rows[run.req_id])


def test_rules_do_not_change_logprobs() -> None:
    """They are the model's own: before bans, biases, temperature and filters."""
    loop = Loop(D2F)
    options = {"logit_bias": {3: 5.0, 4: -5.0}, "temperature": 0.5, "top_p": 0.9}
    run = start(loop, "biased", 9, logprobs=2, **options)
    check(run, loop, decode(loop, [run])["biased"])
