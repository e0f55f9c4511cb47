"""Word problems, and the same ones with an answer in JSON."""

import json

import jsonschema
import pytest

from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    JSON_REQUEST,
    ask_in_json,
    extract_answer,
    extract_json_answer,
    problem,
    train_seeds,
)


@pytest.mark.parametrize("seed", train_seeds(40))
def test_json_answers_say_what_worked_answers_say(seed: int) -> None:
    free = problem(seed)
    asked = ask_in_json(free)
    assert asked.question == free.question + JSON_REQUEST
    found = json.loads(asked.answer)
    jsonschema.validate(found, ANSWER_SCHEMA)
    assert len(found["steps"]) == len(free.answer.splitlines()) - 1
    for step in found["steps"]:
        left, result = step.split(" = ")
        assert eval(left) == int(result) and f" {step} " in free.answer
    assert found["answer"] == int(result) == extract_answer(free.answer)
    assert free.is_right(free.answer) and asked.is_right(asked.answer)
    assert not free.is_right(asked.answer) and not asked.is_right(free.answer)


@pytest.mark.parametrize(
    "text", ["", "12", "[12]", '{"answer": "12"}', '{"answer": true}', "{"]
)
def test_texts_without_an_answer_in_json(text: str) -> None:
    assert extract_json_answer(text) is None
