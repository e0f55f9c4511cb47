"""Structured output over HTTP, on the bundled model: forms, tools, hostile grammars, full house."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from grammar_cases import SCHEMAS, schema_case, valid
from hostile_grammars import COMPILED, HOSTILE
from processes import Server

from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    Problem,
    ask_in_json,
    problems_of,
)

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

PROBLEMS = problems_of(32)
SHAPES = {"look": SCHEMAS["range"], "stop": SCHEMAS["empty"]}
CALLS = {"begin": "<call>", "schema": {"type": "integer"}, "end": "</call>"}
SECONDS = (
    15  # of two threads at work; one that waits for a busy core spins, and counts too
)


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


def body_of(asked: Problem, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked.question}]
    return {"messages": messages, "max_tokens": 128, "temperature": 0} | more


def message_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.post("chat/completions", body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0]["message"])


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    """A `response_format` that holds an answer to a schema."""
    told = {"name": "answer", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": told}


def test_a_schema_through_the_openai_client(server: Server) -> None:
    """Streamed and not, asked for in the question and by the schema alone."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for asked in (ask_in_json(PROBLEMS[0]), PROBLEMS[1]):
        body = body_of(asked, model="tiny", response_format=form_of(ANSWER_SCHEMA))
        [choice] = client.chat.completions.create(**body).choices
        found = json.loads(choice.message.content or "")
        assert set(found) == {"steps", "answer"}
        stream = client.chat.completions.create(**body, stream=True)
        texts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(texts) == choice.message.content
    any_object = body_of(PROBLEMS[2], response_format={"type": "json_object"})
    assert isinstance(json.loads(message_of(server, any_object)["content"]), dict)
    regex = body_of(PROBLEMS[3], structured_outputs={"regex": "[xy]{3}z"})
    assert re.fullmatch("[xy]{3}z", message_of(server, regex)["content"])


def test_schemas_with_names_by_pattern(server: Server) -> None:
    """Guidance reads what vLLM never asks it about; the rest is refused in our words."""
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "patternProperties": {"^x-[a-z]$": {"type": "boolean"}},
        "required": ["answer", "x-a"],
        "additionalProperties": False,
    }
    body = body_of(PROBLEMS[0], response_format=form_of(schema))
    found = json.loads(message_of(server, body)["content"])
    assert isinstance(found.pop("answer"), int)
    assert {"x-a"} <= found.keys()
    for name, value in found.items():
        assert re.fullmatch("x-[a-z]", name) and isinstance(value, bool)
    far = schema | {"properties": {"a": {"$ref": "https://example.com/a.json"}}}
    form = form_of(far)
    text = {"format": {"type": "json_schema", "name": "a", "schema": far}}
    for route, refused in {
        "chat/completions": body_of(PROBLEMS[0], response_format=form, stream=True),
        "responses": {"input": "hello", "text": text},
    }.items():
        reply = server.post(route, refused)
        assert reply.status_code == 400 and "utlines" not in reply.text
        assert "has a $ref to https://example.com/a.json" in reply.text
    # What the engine's client refuses names the field of the body, too.
    several = {"type": "object", "minProperties": 2}
    for field, body in {
        "response_format": body_of(PROBLEMS[0], response_format=form_of(several)),
        "structured_outputs json": body_of(
            PROBLEMS[0], structured_outputs={"json": several}
        ),
    }.items():
        reply = server.post("chat/completions", body)
        assert reply.status_code == 400
        assert f"{field} has minProperties 2" in reply.json()["error"]["message"]


def test_counts_say_which_way_was_taken(server: Server) -> None:
    """In a reply and in a stream; free requests have no such field."""
    asked = {
        "max_tokens": 20,
        "diffusion": {},
        "structured_outputs": {"regex": "[xy]{3}z"},
    }
    chosen = asked | {"structured_outputs": {"choice": ["xyz", "yxz"]}}
    # `auto` follows benchmarks/reports/grammar_modes.md.
    for form, way, taken in (
        (asked, "auto", "drafts"),
        (asked, "automaton", "automaton"),
        (asked, "drafts", "drafts"),
        (chosen, "auto", "automaton"),
        (chosen, "drafts", "drafts"),
    ):
        body = body_of(PROBLEMS[3], vllm_xargs={"dllm_grammar": way}, **form)
        reply = server.post("chat/completions", body).json()
        [choice] = reply["choices"]
        assert choice["diffusion"]["grammar"] == taken
        assert reply["metrics"]["diffusion"]["grammar"] == taken
        chunks = server.stream("chat/completions", body)
        last = [
            c for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")
        ]
        assert [one["diffusion"] for one in last] == [choice["diffusion"]]
    # Two choices of a grammar that has no automaton.
    tagged = asked | {
        "structured_outputs": {"json_object": True},
        "n": 2,
        "temperature": 1.0,
    }
    reply = server.post("chat/completions", body_of(PROBLEMS[3], **tagged)).json()
    assert [choice["diffusion"]["grammar"] for choice in reply["choices"]] == [
        "drafts"
    ] * 2
    free = server.post(
        "chat/completions", body_of(PROBLEMS[3], max_tokens=20, diffusion={})
    ).json()
    assert "grammar" not in free["metrics"]["diffusion"]


def test_a_stream_of_drafts(server: Server) -> None:
    """Its pieces make up the text of the reply: nothing is sent that is dropped later."""
    # Of one token a forward, lest all of its blocks are ready when the first one is sent.
    slow = {"vllm_xargs": {"dllm_grammar": "drafts", "dllm_threshold": 1.0}}
    regex = "[a-f]{90,99}"
    forms: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"json": ANSWER_SCHEMA}, valid(ANSWER_SCHEMA)),
        ({"regex": regex}, re.compile(regex).fullmatch),
    ]
    for asked, judge in forms:
        body = body_of(PROBLEMS[1], structured_outputs=asked, **slow)
        chunks = [
            c
            for chunk in server.stream("chat/completions", body)
            for c in chunk["choices"]
        ]
        pieces = [piece for c in chunks if (piece := c["delta"].get("content"))]
        text = "".join(pieces)
        assert len(pieces) > 1 and judge(text), pieces
        assert text == message_of(server, body)["content"]


def test_structural_tags(server: Server) -> None:
    """In both of vLLM's spellings; free text comes first only where a tag is not forced."""
    tag = {"type": "tag", "begin": "<call>", "end": "</call>"}
    tag["content"] = {"type": "json_schema", "json_schema": CALLS["schema"]}
    forced = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    format_of = {"type": "structural_tag", "format": forced | {"at_least_one": True}}
    text = message_of(server, body_of(PROBLEMS[0], response_format=format_of))[
        "content"
    ]
    assert re.match(r"<call>-?\d+</call>", text)
    asked = {"structured_outputs": {"structural_tag": json.dumps(format_of)}}
    assert message_of(server, body_of(PROBLEMS[0], **asked))["content"] == text
    # Nothing forces this one, but every text that has a `<` is held to the tag behind it.
    old = {"type": "structural_tag", "structures": [CALLS], "triggers": ["<"]}
    plain = message_of(server, body_of(PROBLEMS[0]))["content"]
    assert (
        message_of(server, body_of(PROBLEMS[0], response_format=old))["content"]
        == plain
    )
    opened = body_of(
        PROBLEMS[0], response_format=old, logit_bias={"27": 100}, max_tokens=20
    )
    assert re.match(r"<call>-?\d+</call>", message_of(server, opened)["content"])
    wrong = {
        "type": "structural_tag",
        "structures": [CALLS],
        "triggers": ["no such beginning"],
    }
    reply = server.post("chat/completions", body_of(PROBLEMS[0], response_format=wrong))
    assert (
        reply.status_code == 400
        and "structural_tag" in reply.json()["error"]["message"]
    )


def tools(strict: bool) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": shape, "strict": strict},
        }
        for name, shape in SHAPES.items()
    ]


def test_tools_that_have_to_be_called(server: Server) -> None:
    """A tool that is named, and one of several that is required; vLLM makes a structural tag."""
    named = {"type": "function", "function": {"name": "look"}}
    for choice in (named, "required"):
        body = body_of(PROBLEMS[0], tools=tools(True), tool_choice=choice)
        calls = message_of(server, body)["tool_calls"]
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert set(arguments) == set(SHAPES[call["function"]["name"]]["properties"])
        assert calls
    # The last one, streamed: its arguments come in pieces.
    streamed: dict[int, list[str]] = {}
    for chunk in server.stream("chat/completions", body):
        for call in chunk["choices"][0]["delta"].get("tool_calls") or ():
            streamed.setdefault(call["index"], []).append(
                call["function"].get("arguments") or ""
            )
    told = [json.loads("".join(pieces)) for pieces in streamed.values()]
    assert told == [json.loads(call["function"]["arguments"]) for call in calls]


def test_a_call_that_is_cut(server: Server) -> None:
    """Of its arguments a stream has what was written, and never an empty object."""
    named = {"type": "function", "function": {"name": "look"}}
    body = body_of(PROBLEMS[0], tools=tools(True), tool_choice=named)
    called = 0
    for most in range(16, 64, 4):
        pieces: list[str] = []
        reason = None
        for chunk in server.stream("chat/completions", body | {"max_tokens": most}):
            [choice] = chunk["choices"]
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls") or ():
                pieces.append(call["function"].get("arguments") or "")
        called += bool(pieces) and reason == "length"
        assert reason == "length" or json.loads("".join(pieces))
        assert "".join(pieces) != "{}", most
    assert called


def test_tools_that_may_be_called(server: Server) -> None:
    """With strict tools vLLM's parser asks for a tag, which a text without a call does not feel."""
    auto = body_of(PROBLEMS[0], tool_choice="auto")
    plain = message_of(server, body_of(PROBLEMS[0]))["content"]
    for strict in (True, False):
        assert message_of(server, auto | {"tools": tools(strict)})["content"] == plain
        # Only a request with a grammar refuses this parameter.
        reply = server.post(
            "chat/completions", auto | {"tools": tools(strict), "min_tokens": 3}
        )
        assert reply.status_code == (400 if strict else 200), reply.text
        assert (
            not strict
            or "min_tokens 3 can contradict" in reply.json()["error"]["message"]
        )


def spent(server: Server) -> float:
    """Processor seconds of the server's processes so far."""
    pids = set(re.findall(r"\(\w+ pid=(\d+)\)", server.log.read_text()))
    times = [psutil.Process(int(pid)).cpu_times() for pid in pids]
    assert len(pids) >= 2
    return sum(one.user + one.system for one in times)


def test_hostile_grammars(server: Server) -> None:
    """A refusal or a valid text, as listed, and a neighbour as if nothing were there."""
    free = body_of(PROBLEMS[0])
    alone = message_of(server, free)["content"]
    for name, (asked, expected) in HOSTILE.items():
        before, began = spent(server), time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            neighbour = pool.submit(message_of, server, free)
            body = body_of(PROBLEMS[1], structured_outputs=asked, max_tokens=40)
            reply = server.post("chat/completions", body)
            assert neighbour.result()["content"] == alone, name
        took, waited = spent(server) - before, time.monotonic() - began
        told = reply.json()
        print(
            f"{name}: {reply.status_code}, {took:.1f} s of processors, {waited:.1f} s",
            told,
        )
        assert took < SECONDS, name
        if not isinstance(expected, str):
            assert reply.status_code == 200, (name, told)
            assert expected(told["choices"][0]["message"]["content"]), (name, told)
            continue
        assert reply.status_code == 400, (name, told)
        message = told["error"]["message"].strip()
        [kind] = asked
        if expected.startswith(COMPILED):
            expected = expected.replace(" ", f" {kind} ", 1)
        assert expected in message and "\n" not in message, (name, told)
    assert message_of(server, free)["content"] == alone


# Without any text, which only the engine finds out.
ITSELF = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
EBNF = {"structured_outputs": {"grammar": "root ::= root"}}
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
AS_TEXT = {"format": {"type": "json_schema", "name": "a", "schema": ITSELF}}
AS_OUTPUT = {"format": {"type": "json_schema", "schema": ITSELF}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("v1/completions", EBNF | {"prompt": ["a", "b"]}, "structured_outputs grammar"),
    ("v1/completions", EBNF | {"prompt": "a", "n": 2}, "structured_outputs grammar"),
    ("v1/chat/completions", ASKED | EBNF, "structured_outputs grammar"),
    (
        "v1/chat/completions",
        ASKED | EBNF | {"diffusion": {}},
        "structured_outputs grammar",
    ),
    (
        "v1/chat/completions",
        ASKED | {"response_format": form_of(ITSELF)},
        "response_format",
    ),
    ("v1/messages", ASKED | {"output_config": AS_OUTPUT}, "output_config"),
    ("v1/responses", {"input": "hello", "text": AS_TEXT}, "text"),
    ("invocations", ASKED | EBNF, "structured_outputs grammar"),
]


@pytest.mark.parametrize("path, asked, field", REFUSED)
@pytest.mark.parametrize("streams", [False, True])
def test_grammars_that_only_the_engine_refuses(
    server: Server, path: str, asked: dict[str, Any], field: str, streams: bool
) -> None:
    """A 400 with the field of the body on every route; a stream of responses has begun by then."""
    body = {"model": "tiny", "stream": streams} | asked
    reply = httpx.post(f"{server.url}/{path}", json=body, timeout=120)
    error = reply.text
    if path == "v1/responses" and streams:
        assert reply.status_code == 200
        assert '"type": "error"' in error and '"invalid_request_error"' in error
    else:
        assert reply.status_code == 400
    assert f'"{field} cannot be honoured: the grammar allows no text' in error


def test_a_batch_whose_grammar_only_the_engine_refuses(server: Server) -> None:
    [message] = ASKED["messages"]
    body = ASKED | EBNF | {"messages": [[message], [message]]}
    reply = server.post("chat/completions/batch", body)
    assert reply.status_code == 400
    assert "structured_outputs grammar cannot be" in reply.json()["error"]["message"]


def test_a_full_house(server: Server) -> None:
    """64 requests at once, every second one held to a schema: the free ones keep their tokens."""
    names = (
        "answer",
        "flat",
        "nested",
        "enum",
        "optional",
        "any_of",
        "bounded_list",
        "recursive",
    )

    def told(body: dict[str, Any]) -> list[int]:
        reply = server.post("chat/completions", body | {"return_token_ids": True})
        assert reply.status_code == 200, reply.text
        return list(reply.json()["choices"][0]["token_ids"])

    free = [body_of(asked) for asked in PROBLEMS]
    with ThreadPoolExecutor(64) as pool:
        alone = list(pool.map(told, free))
        beside = [
            pool.submit(
                message_of, server, body_of(p, response_format=form_of(SCHEMAS[name]))
            )
            for p, name in zip(PROBLEMS, names * 4, strict=True)
        ]
        assert list(pool.map(told, free)) == alone
        texts = [one.result()["content"] for one in beside]
    for text, name in zip(texts, names * 4, strict=True):
        assert schema_case(name).judge(text), (name, text)
