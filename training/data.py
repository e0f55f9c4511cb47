"""Prepare training data: problems as token tensors, and batches with masks sampled on the device.

Tensor suffixes: N problems, B sequences of a batch, T positions. A sequence is
``prompt | response canvas | padding``; the canvas is the answer, its EOS, and more EOS.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from multiprocessing import get_context
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffuplug_bench.word_problems.chat_prompts import EOS, MASK, token_id
from diffuplug_bench.word_problems.generator import Problem, ask_in_json, problem
from training.chats import Row, in_a_chat
from training.model import PADDING_BLOCK
from training.others import REPLY, other, politely, short_problem

BLOCK_SIZES = (8, 16, 32, 32, 64)
EOS_PADDING_WEIGHT = (
    0.1  # EOS after the first one: must be learned but not dominate the loss
)
LATER_BLOCK_WEIGHT = 0.3  # blocks after the one that is being decoded
SMALLEST_RATIO = 0.03  # the loss divides by the mask ratio
# Positions per sequence; the second holds canvases of about 260 and chats, the third long prompts.
LENGTHS = (208, 336, 960)


@dataclass(frozen=True)
class Dataset:
    """Store tokenised rows on one device: int16 ids (0 beyond the length) and lengths."""

    prompts_NP: Tensor
    prompt_lens_N: Tensor
    responses_NR: Tensor  # answer and one EOS
    response_lens_N: Tensor
    given_N: Tensor  # leading answer tokens that are never masked
    rows_of: tuple[Tensor, ...]  # for each of LENGTHS the rows that fit no shorter one
    num_problems: int  # rows less those that ask a problem again or ask no problem
    eos: int
    mask: int

    def __len__(self) -> int:
        return len(self.prompt_lens_N)


@dataclass(frozen=True)
class Batch:
    """Hold one training batch [B, T]; `weights` is 0 where nothing is to be predicted."""

    inputs: Tensor
    targets: Tensor
    blocks: Tensor
    weights: Tensor
    scale: Tensor  # scalar: what the weighted loss is divided by


def make_problems(seeds: range, processes: int) -> Iterator[Problem]:
    """Generate the problems of these seeds in order, on several processes."""
    if processes <= 1:
        yield from map(problem, seeds)
        return
    with get_context("fork").Pool(processes) as pool:
        yield from pool.imap(problem, seeds, chunksize=2000)


def unseen(problems: Iterable[Problem], held_out: set[str]) -> Iterator[Problem]:
    """Keep distinct problems whose question is not in `held_out`."""
    seen = set(held_out)
    for p in problems:
        if p.question not in seen:
            seen.add(p.question)
            yield p


def forms(problems: Iterable[Problem]) -> Iterator[Row]:
    """Yield each problem, and half of them a second time with an answer in JSON.

    One in ten is asked for no form, and given the beginning of JSON: a schema that nobody spoke of
    in the question writes the opening brace, and the model is to go on from there.
    """
    for i, p in enumerate(problems):
        yield Row(p)
        asked = ask_in_json(p)
        if i % 10 < 4:
            yield Row(asked)
        elif i % 10 < 5:
            yield Row(replace(asked, question=p.question), given=1)


def with_others(rows: Iterable[Row], share: float, held_out: set[str]) -> Iterator[Row]:
    """Mix other prompts into the rows, until they are `share` of all.

    Some problems have words of a person before them, and some have only one step, so that only
    what is no problem gets the reply to other prompts.
    """
    for number, row in enumerate(rows):
        rng = Random(f"others {number}")
        kind = rng.random()
        if kind < 0.05:
            yield replace(row, asked=politely(rng, row.asked))
        else:
            yield row
        if kind > 0.97:
            yield Row(short_problem(rng))
        while rng.random() < share:
            yield Row(other(rng, held_out))


def with_chats(rows: Iterable[Row]) -> Iterator[Row]:
    """Put some rows after a system prompt or earlier turns, which are made of rows before them."""
    recent: deque[Problem] = deque(maxlen=200)
    for number, row in enumerate(rows):
        yield in_a_chat(row, number, recent)
        recent.append(row.asked)


def make_dataset(
    rows: Iterable[Row], tokenizer: Tokenizer, device: torch.device
) -> Dataset:
    """Tokenise rows, 20,000 at a time, into padded int16 tensors on `device`.

    Rows longer than the last of LENGTHS are left out.
    """
    prompts: list[Tensor] = []
    responses: list[Tensor] = []
    given: list[int] = []
    num_problems = 0
    source = iter(rows)
    while chunk := list(islice(source, 20_000)):
        asked = tokenizer.encode_batch_fast([row.prompt() for row in chunk])
        answers = [row.asked.answer + EOS for row in chunk]
        answered = tokenizer.encode_batch_fast(answers)
        for row, prompt, response in zip(chunk, asked, answered, strict=True):
            if len(prompt.ids) + len(response.ids) > LENGTHS[-1]:
                continue
            prompts.append(torch.tensor(prompt.ids, dtype=torch.int16))
            responses.append(torch.tensor(response.ids, dtype=torch.int16))
            given.append(row.given)
            num_problems += not (row.asked.in_json or row.asked.answer == REPLY)

    def pad(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True).to(device)

    def lengths(rows: list[Tensor]) -> Tensor:
        return torch.tensor([len(r) for r in rows], device=device)

    prompt_lens_N, response_lens_N = lengths(prompts), lengths(responses)
    needed_N = prompt_lens_N + response_lens_N
    rows_of = []
    for shorter, length in pairwise((0, *LENGTHS)):
        fit_N = (needed_N > shorter) & (needed_N <= length)
        rows_of.append(fit_N.nonzero()[:, 0])
    return Dataset(
        pad(prompts),
        prompt_lens_N,
        pad(responses),
        response_lens_N,
        torch.tensor(given, device=device),
        tuple(rows_of),
        num_problems,
        token_id(tokenizer, EOS),
        token_id(tokenizer, MASK),
    )


def pick_rows(data: Dataset, count: int, which: int, rng: torch.Generator) -> Tensor:
    """Pick rows for a batch of `LENGTHS[which]`: half fit no shorter one, half fit the first."""

    def pick(rows: Tensor, count: int) -> Tensor:
        return rows[
            torch.randint(len(rows), (count,), generator=rng, device=rng.device)
        ]

    short_S, long_L = data.rows_of[0], data.rows_of[which]
    if not which or not len(long_L):
        return pick(short_S, count)
    return torch.cat([pick(long_L, count // 2), pick(short_S, count - count // 2)])


def _choose(values: tuple[int, ...], like_B: Tensor, rng: torch.Generator) -> Tensor:
    """Sample one of `values` for each sequence."""
    picks = torch.randint(
        len(values), like_B.shape, generator=rng, device=like_B.device
    )
    return torch.tensor(values, device=like_B.device)[picks]


def _uniform(*sizes: int, rng: torch.Generator) -> Tensor:
    return torch.rand(*sizes, generator=rng, device=rng.device)


def _mask_ratios(
    index_BT: Tensor, count_B: Tensor, kinds_B: Tensor, rng: torch.Generator
) -> Tensor:
    """Sample mask probabilities [B, T] from the block index (0-based) of each canvas position.

    kind 0: one ratio for all positions (LLaDA)
    kind 1: a sequence that is being decoded: no masks before a random block, that block at a
            ratio, later blocks all masked
    kind 2: ratios that do not fall from left to right (D2F)
    kind 3: as kind 2, after a prefix without masks
    """
    rows = len(count_B)
    even = (torch.arange(rows, device=rng.device) + _uniform(1, rng=rng)) / rows
    ratio_B = even[torch.randperm(rows, generator=rng, device=rng.device)]
    ratio_B = ratio_B.clamp(min=SMALLEST_RATIO)[:, None]
    frontier_B = (_uniform(rows, rng=rng) * count_B).long()[:, None]
    most = int(index_BT.shape[1]) // min(BLOCK_SIZES) + 1
    steps = _uniform(rows, most, rng=rng)
    columns = torch.arange(most, device=rng.device)
    steps = steps.masked_fill(columns >= count_B[:, None], 1.0).sort(-1).values
    rising = steps.clamp(min=SMALLEST_RATIO).gather(1, index_BT.clamp(0, most - 1))
    before = index_BT < frontier_B
    kinds = kinds_B[:, None]
    ratios = torch.where(kinds == 0, ratio_B.expand_as(rising), rising)
    decoding = torch.where(index_BT == frontier_B, ratio_B, torch.ones_like(rising))
    ratios = torch.where(kinds == 1, decoding, ratios)
    return ratios.masked_fill(before & ((kinds == 1) | (kinds == 3)), 0.0)


def make_batch(
    data: Dataset, rows_B: Tensor, length: int, adapter: bool, rng: torch.Generator
) -> Batch:
    """Make a batch of `length` positions from entries of `data`; `adapter` selects D2F's masks."""
    at = torch.arange(length, device=rows_B.device)[None]
    prompt_B = data.prompt_lens_N[rows_B][:, None]
    answer_B = data.response_lens_N[rows_B][:, None]
    room_B = length - prompt_B - answer_B
    spare_B = (_uniform(len(rows_B), 1, rng=rng) * (room_B + 1)).long()
    offset = at - prompt_B  # position inside the canvas
    in_canvas = (offset >= 0) & (offset < answer_B + spare_B)
    in_answer = (offset >= 0) & (offset < answer_B)
    prompts, responses = (
        data.prompts_NP[rows_B].long(),
        data.responses_NR[rows_B].long(),
    )
    last = prompts.shape[1] - 1
    ids = prompts.gather(1, at.expand(len(rows_B), -1).clamp(max=last))
    answers = responses.gather(1, offset.clamp(0, responses.shape[1] - 1))
    targets = torch.where(offset < 0, ids, torch.where(in_answer, answers, data.eos))

    size_B = _choose((16, 16, 16, 32) if adapter else BLOCK_SIZES, rows_B, rng)[:, None]
    index = offset.div(size_B, rounding_mode="floor")
    count_B = ((answer_B + size_B - 1) // size_B)[:, 0]
    kinds = (2, 2, 3) if adapter else (0, 0, 0, 1, 1, 1, 1, 2, 3)
    kinds_B = _choose(kinds, rows_B, rng)
    ratios = _mask_ratios(index, count_B, kinds_B, rng)
    hidden = in_canvas & (_uniform(*index.shape, rng=rng) < ratios)
    hidden &= offset >= data.given_N[rows_B][:, None]

    causal_B = _uniform(len(rows_B), 1, rng=rng) < (1.0 if adapter else 0.55)
    blocks = torch.where(causal_B, (index + 1).clamp(min=0), 0)
    blocks = blocks.masked_fill(offset >= answer_B + spare_B, PADDING_BLOCK)
    worth = torch.where(in_answer, 1.0, EOS_PADDING_WEIGHT) * in_canvas
    later = (kinds_B[:, None] == 1) & (ratios == 1.0)
    worth = torch.where(later, LATER_BLOCK_WEIGHT * worth, worth)
    weights = torch.where(hidden, worth / ratios.clamp(min=SMALLEST_RATIO), 0.0)
    return Batch(
        targets.masked_fill(hidden, data.mask), targets, blocks, weights, worth.sum()
    )
