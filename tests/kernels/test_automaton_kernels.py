"""Texts of token automata: the Triton kernels against the reference, and that against all texts."""

import itertools
import math
from typing import Any

import pytest
import torch
from automaton_sums import assert_within, exact_scores, exact_values
from torch import Tensor

from dllm_plugin.kernels.automaton import reference
from dllm_plugin.kernels.automaton.reference import (
    END,
    FAR,
    OPEN,
    OUTSIDE,
    Canvases,
    Path,
    Rows,
    Tables,
)

KERNEL = "dllm_plugin.kernels.automaton.kernel"
TILE, EDGES = 256, 64  # the kernel's own
VOCAB, MASK = 41, 40
# Edges (source, class, target) and how far each state is from a complete text. Class 1 ends.
AUTOMATA = [
    ([(1, 2, 2), (1, 3, 1), (2, 2, 1), (2, 1, END), (0, 1, END)], [0, 1, 0]),
    (
        [(1, 3, 2), (2, 4, 3), (2, 5, 1), (3, 1, END), (0, 1, END), (3, 2, 3)],
        [0, 2, 1, 0],
    ),
]
CLASSES = [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def tables() -> Tables:
    """Both automata, padded as the sampler does."""
    num_edges = max(len(edges) for edges, _ in AUTOMATA)
    num_states = max(len(far) for _, far in AUTOMATA)
    columns: list[list[Tensor]] = [[] for _ in Tables._fields]
    for (edges, far), classes in zip(AUTOMATA, CLASSES, strict=True):
        of_id = torch.tensor([classes[i % len(classes)] for i in range(VOCAB)])
        of_id[MASK] = 0
        order = of_id.argsort(stable=True)
        bound = torch.searchsorted(
            of_id[order], torch.arange(max(map(len, CLASSES)) + 1)
        )
        ordered = torch.tensor(sorted(edges, key=lambda edge: edge[2]))
        padding = torch.zeros(num_edges - len(edges), 3, dtype=torch.int64)
        first = torch.searchsorted(
            ordered[:, 2].contiguous(), torch.arange(num_states + 1)
        )
        whole = torch.cat([ordered, padding])
        distance = torch.tensor(far + [FAR] * (num_states - len(far)))
        made = (
            of_id,
            order,
            bound,
            whole[:, 0],
            whole[:, 1],
            whole[:, 2],
            first,
            distance,
        )
        for column, tensor in zip(columns, made, strict=True):
            column.append(tensor.to(torch.int32))
    return Tables(*map(torch.stack, columns))


def canvases(temperature: float, length: int, room: int) -> Canvases:
    """Four canvases: free, half decided, behind a prompt's tail, and cut by what is asked for."""
    given = torch.full((4, length), OPEN)
    given[1, 1] = 3
    given[2, 0] = OUTSIDE
    given[3, length - 2 :] = OUTSIDE
    count = torch.arange(4)
    return Canvases(
        torch.tensor([0, 1, 0, 1]),
        torch.tensor([1, 2, 2, 1]),
        given,
        torch.full((4,), room),
        torch.full((4,), temperature),
        count * 7 - 3,
        count + 2,
        count * 11,
    )


def rows_of(which: Canvases, length: int, dtype: torch.dtype, bias: bool) -> Rows:
    generator = torch.Generator().manual_seed(length)
    logits = (torch.randn(4 * length, VOCAB, generator=generator) * 3).to(dtype)
    logits[1, 5], logits[2, 7], logits[3, :] = float("nan"), float("inf"), float("-inf")

    def repeated(value: Tensor) -> Tensor:
        return value.repeat_interleave(length)

    place = torch.arange(length).repeat(4)
    table = torch.randn(3, VOCAB, generator=generator)
    table[0] = 0.0
    return Rows(
        logits,
        torch.arange(4 * length).flip(0),
        repeated(torch.arange(4)),
        repeated(which.which_G),
        repeated(which.temperature_G),
        repeated(which.seed_G),
        repeated(which.position_G) + place,
        repeated(which.step_G),
        MASK,
        (table, torch.tensor([0, 2, 1, 1])) if bias else None,
    )


CASES = [
    (0.0, 5, 0, torch.float32),
    (0.0, 6, 3, torch.bfloat16),
    (0.8, 5, 1, torch.float32),
]


@pytest.mark.parametrize(("temperature", "length", "room", "dtype"), CASES)
def test_kernels_are_the_reference(
    temperature: float, length: int, room: int, dtype: torch.dtype, interpreter: Any
) -> None:
    known, which = tables(), canvases(temperature, length, room)
    rows = rows_of(which, length, dtype, bias=length == 5)
    scores = reference.score_rows(known, rows).reshape(4, length, -1)
    values = reference.forward(known, which, scores)
    path = reference.backtrack(known, which, scores, values)
    class_T = path.class_GC.flatten()
    launches = [
        (f"{KERNEL}.score_rows", None, [known, rows], {}),
        (f"{KERNEL}.forward", None, [known, which, scores], {}),
        (f"{KERNEL}.backtrack", None, [known, which, scores, values], {}),
        (f"{KERNEL}.choose_ids", None, [known, rows, class_T], {}),
    ]
    found_scores, found_values, found_path, found_ids = interpreter.run(launches)
    exact, allowed = exact_scores(known, rows, TILE)
    assert_within(found_scores, exact, allowed)
    assert_within(scores.flatten(0, 1), exact, allowed)
    exact, allowed = exact_values(known, which, scores, EDGES)
    assert_within(found_values, exact, allowed)
    assert_within(values, exact, allowed)
    assert torch.equal(Path(*found_path).class_GC, path.class_GC)
    assert torch.equal(Path(*found_path).state_GC1, path.state_GC1)
    has_class = class_T >= 0
    assert torch.equal(
        found_ids[has_class], reference.choose_ids(known, rows, class_T)[has_class]
    )


def every_text(
    which: int, canvas: Canvases, place: int, length: int
) -> dict[tuple[int, ...], int]:
    """All class sequences that a canvas may hold, with the state behind each."""
    edges = AUTOMATA[which][0]
    texts = {(): int(canvas.state_G[place])}
    for position in range(length):
        given = int(canvas.given_GC[place, position])
        longer = {}
        for text, state in texts.items():
            if given == OUTSIDE:
                longer[(*text, OUTSIDE)] = state
                continue
            for source, kind, target in edges:
                if source == state and given in (OPEN, kind):
                    longer[(*text, kind)] = target
        texts = longer
    room, far = int(canvas.room_G[place]), AUTOMATA[which][1]
    return {text: state for text, state in texts.items() if far[state] <= room}


def worth(text: tuple[int, ...], canvas: Canvases, place: int, scores: Tensor) -> float:
    """The log-probability of a text; what stands behind its end is free."""
    total, ended = 0.0, False
    for position, kind in enumerate(text):
        if kind >= 0 and int(canvas.given_GC[place, position]) == OPEN and not ended:
            total += float(scores[place, position, kind])
        ended = ended or kind == 1
    return total


@pytest.mark.parametrize("room", [0, 2])
def test_the_text_is_the_best_of_all(room: int) -> None:
    known, length = tables(), 6
    which = canvases(0.0, length, room)
    scores = reference.score_rows(known, rows_of(which, length, torch.float32, True))
    scores = scores.reshape(4, length, -1)
    path = reference.backtrack(
        known, which, scores, reference.forward(known, which, scores)
    )
    for place in range(4):
        texts = every_text(int(which.which_G[place]), which, place, length)
        best = max(worth(text, which, place, scores) for text in texts)
        found = tuple(path.class_GC[place].tolist())
        assert worth(found, which, place, scores) == pytest.approx(best)
        assert texts[found] == int(path.state_GC1[place, -1])


def test_draws_follow_the_distribution_of_valid_texts() -> None:
    """Each text as often as its share of the probability of all valid ones says."""
    known, length, draws = tables(), 4, 20_000  # the rarest text is drawn often enough
    which = canvases(0.7, length, 1)
    rows = rows_of(which, length, torch.float32, False)
    rows.logits_XV.nan_to_num_(0.0, 0.0, 0.0)
    scores = reference.score_rows(known, rows).reshape(4, length, -1)
    for place in range(4):
        texts = every_text(int(which.which_G[place]), which, place, length)
        shares = {text: math.exp(worth(text, which, place, scores)) for text in texts}
        total = sum(shares.values())
        many = Canvases(
            *(field[place : place + 1].repeat_interleave(draws, 0) for field in which)
        )
        many = many._replace(step_G=torch.arange(draws))
        score = scores[place : place + 1].repeat_interleave(draws, 0)
        path = reference.backtrack(
            known, many, score, reference.forward(known, many, score)
        )
        found = list(map(tuple, path.class_GC.tolist()))
        assert set(found) <= set(texts)
        for text, share in shares.items():
            expected = share / total
            spread = 4 * math.sqrt(expected * (1 - expected) / draws) + 1 / draws
            assert abs(found.count(text) / draws - expected) < spread, (place, text)


def test_ids_of_a_class_are_drawn_by_their_share() -> None:
    known, draws = tables(), 4000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    nothing = torch.zeros(draws, dtype=torch.int64)
    rows = Rows(
        *(logits, nothing, nothing, nothing, torch.full((draws,), 0.5)),
        *(nothing + 9, nothing + 4, torch.arange(draws), MASK, None),
    )
    found = reference.choose_ids(known, rows, nothing + 3)
    members = [i for i in range(VOCAB) if int(known.class_AV[0, i]) == 3]
    shares = torch.softmax(logits[0, members] / 0.5, dim=0)
    for token, share in zip(members, shares.tolist(), strict=True):
        spread = 4 * math.sqrt(share * (1 - share) / draws)
        assert abs(float((found == token).float().mean()) - share) < spread
    assert set(itertools.chain(found.tolist())) <= set(members)
