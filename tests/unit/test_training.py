"""How the bundled model is trained: its tokenizer, its rows, and what a run must reach."""

from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from diffuplug_bench.word_problems.generator import ask_in_json, problem, train_seeds
from dllm_plugin import default_model
from training.data import (
    LENGTHS,
    forms,
    make_batch,
    make_dataset,
    pick_rows,
    with_chats,
    with_others,
)
from training.others import REPLY, other, unseen_prompts
from training.report import score_table, shortfalls
from training.tokenizer import SPECIAL_TOKENS, build_tokenizer

SAMPLE = [problem(seed) for seed in train_seeds(20_000)]  # as many as training takes


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(text for p in SAMPLE for text in (p.question, p.answer))


def test_the_bundled_tokenizer_keeps_its_ids(tokenizer: Tokenizer) -> None:
    bundled = Tokenizer.from_file(
        str(Path(default_model.path(), "tokenizer.json"))
    ).get_vocab()
    assert bundled.items() <= tokenizer.get_vocab().items()
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [
        *range(484, 490)
    ]


def test_answers_in_json_are_short(tokenizer: Tokenizer) -> None:
    for one in SAMPLE[:300]:
        asked = ask_in_json(one)
        ids = tokenizer.encode(asked.answer).ids
        assert tokenizer.decode(ids) == asked.answer
        assert len(ids) < len(tokenizer.encode(one.answer).ids)
        # A schema may force the beginning alone: its tokens are those of the whole.
        assert tokenizer.encode('{"steps": ["').ids == ids[:4]


def test_what_is_given_is_never_masked(tokenizer: Tokenizer) -> None:
    rows = list(islice(forms(SAMPLE), 300))
    data = make_dataset(rows, tokenizer, torch.device("cpu"))
    assert data.num_problems == 200 and data.given_N.sum() == 20
    rng = torch.Generator().manual_seed(0)
    for adapter in (False, True):
        batch = make_batch(data, torch.arange(300), 208, adapter, rng)
        first = data.prompt_lens_N[:, None]
        hidden = (batch.inputs == data.mask).gather(1, first)[:, 0]
        assert not hidden[data.given_N == 1].any() and hidden[data.given_N == 0].any()
        assert torch.equal(batch.inputs == data.mask, batch.weights > 0)


def test_some_rows_stand_in_a_chat(tokenizer: Tokenizer) -> None:
    """As the chat template writes it, with the answer to the last question."""
    rows = list(islice(with_chats(forms(SAMPLE)), 3000))
    template = AutoTokenizer.from_pretrained(default_model.path())
    data = make_dataset(rows, tokenizer, torch.device("cpu"))
    for number, (row, plain) in enumerate(zip(rows, forms(SAMPLE), strict=False)):
        assert (row.asked, row.given) == (plain.asked, plain.given)
        messages = (
            [] if row.system is None else [{"role": "system", "content": row.system}]
        )
        for asked, answered in row.earlier:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        messages.append({"role": "user", "content": row.asked.question})
        text = template.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        if row.raw:
            text = row.asked.question
        ids = data.prompts_NP[number, : data.prompt_lens_N[number]].tolist()
        assert ids == tokenizer.encode(text).ids
    behind_turns = [row for row in rows if row.earlier]
    assert 650 < len(behind_turns) < 850 and any(row.system for row in behind_turns)
    assert 400 < sum(row.system is not None for row in rows) < 600
    assert 50 < sum(row.raw for row in rows) < 130


def test_long_rows_come_only_in_long_batches(tokenizer: Tokenizer) -> None:
    data = make_dataset(
        islice(with_chats(forms(SAMPLE)), 2000), tokenizer, torch.device("cpu")
    )
    needed = data.prompt_lens_N + data.response_lens_N
    assert sum(map(len, data.rows_of)) == len(data) <= 2000
    rng = torch.Generator().manual_seed(0)
    assert needed[pick_rows(data, 64, 0, rng)].max() <= LENGTHS[0]
    for which in (1, 2):
        rows, shorter = needed[data.rows_of[which]], LENGTHS[which - 1]
        assert shorter < rows.min() and rows.max() <= LENGTHS[which] and len(rows) > 10
        long = pick_rows(data, 64, which, rng)
        assert (needed[long] > shorter).sum() == 32
        batch = make_batch(data, long, LENGTHS[which], False, rng)
        ends = (needed[long] - 1)[:, None]
        assert (batch.targets.gather(1, ends) == data.eos).all()


def test_prompts_of_other_kinds() -> None:
    """They get one sentence; none of the evaluation's is among them, and problems stay."""
    held_out = set(unseen_prompts())
    assert len(held_out) == 200
    plain = list(islice(forms(SAMPLE), 2000))
    rows = list(with_others(plain, 0.35, held_out))
    others = [row.asked.question for row in rows if row.asked.answer == REPLY]
    assert 0.3 < len(others) / len(rows) < 0.4
    assert len(set(others)) > 0.9 * len(others) and not held_out & set(others)
    problems = [row.asked for row in rows if row.asked.answer != REPLY]
    asked = [one.question for one in problems]
    assert sum(row.asked.question in asked for row in plain) > 1800
    assert not set(others) & set(asked)
    assert all(one.is_right(one.answer) for one in problems)


def test_held_out_prompts_are_left_out() -> None:
    rng = Random(0)
    made = {other(rng, set()).question for _ in range(300)}
    assert not made & {other(Random(0), made).question}


def test_a_run_is_held_to_its_scores() -> None:
    def score(right: int) -> dict[str, Any]:
        counts = {
            "problems": 500,
            "tokens": 24958,
            "forwards": 1083,
            "tokens_per_forward": 23.045,
        }
        rest = {"block": 32, "max_new_tokens": 128, "exact_text": right / 500}
        return {"accuracy": right / 500} | counts | rest

    scores = {"d2f": score(495), "d2f_bf16": score(494), "d2f_json": score(475)}
    assert shortfalls(scores) == ["d2f_bf16: 98.8%, at least 99% wanted"]
    assert shortfalls({"d2f_json_bf16": score(474)})
    assert (
        score_table(scores).splitlines()[2]
        == "| d2f | 32 | 495 | 495 | 24,958 | 1,083 | 23.0 |"
    )
