"""Introspective strides on a model of tensors: accepted drafts, and texts of causal decoding."""

from typing import Any

import pytest
import torch
from handmade import MASK, canvas, committed

from dllm_plugin.decoding.causal_rows import (
    accept_stride,
    plan_stride,
    rows_of_stride,
    stride_slots,
)
from dllm_plugin.decoding.plan import Proposal

VOCAB, STOP = 12, 11


def next_token(tokens: list[int]) -> int:
    """A causal model that often sees only its last token, so that drafts are right."""
    last = tokens[-1]
    sees_more = len(tokens) % 3 == 0
    return (5 * last + 3 + sees_more * tokens[-2]) % VOCAB


def slots(tokens_RC: torch.Tensor, rows: int) -> Any:
    return stride_slots(tokens_RC, torch.tensor([0]), torch.tensor([rows]), MASK)


def decode(prompt: list[int], count: int, stride: int, room: int) -> tuple[list, int]:
    """Tokens and forwards of the strategy, with `room` positions for the answer."""
    width, text = 2 * stride, list(prompt)
    tokens_C = torch.full((width,), MASK)
    tokens_C[0], forwards = next_token(prompt), 0
    while True:
        rows = min(rows_of_stride(stride), room - (len(text) - len(prompt)))
        seen = canvas(1, width, tokens=tokens_C.tolist())
        size, computed, block = slots(seen.tokens_RC, rows)
        seen = seen._replace(size_RS=size, computed_RS=computed, block_RC=block)
        plan = plan_stride(seen, MASK)
        proposed = torch.full((1, width), MASK + 1)
        for row in range(rows):
            here = [*text, *tokens_C[: row + 1].tolist()]
            if row + 1 < width:
                proposed[0, row + 1] = next_token(here)
        confidence = torch.ones(1, width)
        proposal = Proposal(proposed, confidence, confidence)
        seen, plan, unmask = accept_stride(
            seen, plan, plan.candidates_RC, proposal, MASK
        )
        after = torch.where(unmask, proposed, seen.tokens_RC)
        left = torch.tensor([min(count, room) - (len(text) - len(prompt))])
        outcome = committed(seen, plan, unmask, after, after == STOP, left)
        forwards += 1
        moved = int(outcome.num_committed_R)
        text += after[0, :moved].tolist()
        if bool(outcome.ended_R):
            return text[len(prompt) :], forwards
        tokens_C = torch.cat([after[0, moved:], torch.full((moved,), MASK)])


def causal(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
        if text[-1] == STOP:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("stride", range(1, 9))
def test_texts_are_those_of_causal_decoding(stride: int) -> None:
    fewer = 0
    for seed in range(40):
        prompt = [1 + seed % 7, seed % VOCAB, (3 * seed) % VOCAB]
        for count, room in ((1, 40), (30, 40), (30, 6), (30, 1)):
            wanted = causal(prompt, min(count, room))
            tokens, forwards = decode(prompt, count, stride, room)
            assert tokens == wanted
            assert forwards <= max(1, len(wanted))
            fewer += forwards < len(wanted) - 1
    assert fewer or stride == 1


def test_an_ended_request_commits_nothing() -> None:
    seen = canvas(1, 6, tokens=[3, MASK, MASK, MASK, MASK, MASK], ended_R=True)
    size, computed, block = slots(seen.tokens_RC, 5)
    seen = seen._replace(size_RS=size, computed_RS=computed, block_RC=block)
    plan = plan_stride(seen, MASK)
    assert not plan.candidates_RC.any() and not plan.active_RS.any()
    ones = torch.ones(1, 6)
    proposal = Proposal(torch.full((1, 6), 4), ones, ones)
    seen, plan, unmask = accept_stride(seen, plan, plan.candidates_RC, proposal, MASK)
    left, nothing = torch.tensor([9]), torch.zeros(1, 6, dtype=torch.bool)
    outcome = committed(seen, plan, unmask, seen.tokens_RC, nothing, left)
    assert int(outcome.num_committed_R) == 0 and bool(outcome.ended_R)
