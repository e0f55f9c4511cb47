"""Requests of README and of the page of the HTTP API, on the server that README starts."""

import ast
import json
import math
import shlex
from typing import Any

import pytest
from documented import MODEL_CARD, REQUEST_PAGES, example_of, outputs_of, requests_of
from processes import Server

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

REQUESTS = [(page, *found) for page in REQUEST_PAGES for found in requests_of(page)]


def is_shown(found: Any, shown: Any) -> bool:
    """Return whether a value is as shown: objects may have more, numbers are rounded."""
    if isinstance(shown, dict) and isinstance(found, dict):
        return all(key in found and is_shown(found[key], shown[key]) for key in shown)
    if isinstance(shown, list) and isinstance(found, list):
        same = len(found) == len(shown)
        return same and all(map(is_shown, found, shown))
    if isinstance(shown, float) and isinstance(found, (int, float)):
        return math.isclose(found, shown, rel_tol=0.1, abs_tol=0.1)
    return bool(found == shown)


def objects(value: Any) -> list[dict[str, Any]]:
    """Return all objects of a reply."""
    found = [value] if isinstance(value, dict) else []
    for part in value.values() if found else value:
        if isinstance(part, (dict, list)):
            found += objects(part)
    return found


@pytest.mark.parametrize(("page", "command", "shown"), REQUESTS)
def test_a_printed_request(
    page: str, command: str, shown: str, bundled_server: Server
) -> None:
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    path = words[1].removeprefix("http://localhost:8000/v1/")
    reply = bundled_server.post(path, body)
    assert reply.status_code == 200, reply.text
    if shown:
        wanted = json.loads(shown)
        assert any(is_shown(one, wanted) for one in objects(reply.json())), reply.text
    if page == "README.md":
        [choice] = reply.json()["choices"]
        assert choice["message"]["content"].endswith("\n#### 50")


def test_the_answers_of_the_model_card(bundled_server: Server) -> None:
    """In sentences and in JSON, to the question of its program."""
    [assignment] = [
        node
        for node in ast.walk(ast.parse(example_of("default_model")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "question"
    ]
    question = ast.literal_eval(assignment.value)
    shown = [text for _, text in outputs_of(MODEL_CARD)]
    for ending, wanted in zip(("", " Answer in JSON."), shown[:2], strict=True):
        messages = [{"role": "user", "content": question + ending}]
        reply = bundled_server.post(
            "chat/completions", {"messages": messages, "temperature": 0}
        )
        assert reply.json()["choices"][0]["message"]["content"] + "\n" == wanted


@pytest.mark.parametrize(
    "text", ["hello", "Who are you?", "What is the capital of France?"]
)
def test_what_is_no_word_problem(text: str, bundled_server: Server) -> None:
    """It gets the sentence of the model card, and a problem after it is solved."""
    messages = [{"role": "user", "content": text}]
    reply = bundled_server.post(
        "chat/completions", {"messages": messages, "temperature": 0}
    )
    sentence = reply.json()["choices"][0]["message"]["content"]
    assert f"\n{sentence}\n" in MODEL_CARD.read_text(encoding="utf-8")
    messages.append({"role": "assistant", "content": sentence})
    messages.append({"role": "user", "content": sentence.partition(": ")[2]})
    reply = bundled_server.post(
        "chat/completions", {"messages": messages, "temperature": 0}
    )
    assert reply.json()["choices"][0]["message"]["content"].endswith("\n#### 36")


def test_there_are_requests() -> None:
    assert len(REQUESTS) >= 4 and sum(bool(shown) for *_, shown in REQUESTS) >= 3
