"""A real server of each newer family: chats, streams, scores, seeds, grammars, gaps, refusals."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from engines import CHECKPOINTS
from processes import INSIDE, Server, serving

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

REGEX = r"[a-e]{4,9};[0-9]+"
MESSAGES = [{"role": "user", "content": "one two three"}]
TOOL = {
    "name": "count",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
CHAT = {"messages": MESSAGES, "max_tokens": 20, "ignore_eos": True}


class Row(NamedTuple):
    """What a family serves besides chats."""

    canvas: int | None = None  # None: the default
    has_gaps: bool = False
    scores_prompts: bool = False
    options: tuple[str, ...] = ()


BEGIN_THINKING, END_THINKING = 280, 281  # tokens of A2D
# As its page says: the parser reads only there whether a chat thinks.
QWEN3 = (
    "--reasoning-parser=qwen3",
    '--default-chat-template-kwargs={"enable_thinking": false}',
    # Without it grammars are refused.
    '--structured-outputs-config={"enable_in_reasoning": true}',
)
ROWS = {
    "stable-diffcoder": Row(),
    "llada-moe": Row(32, has_gaps=True),
    "rnd1": Row(32, has_gaps=True),
    "a2d-qwen3": Row(32, has_gaps=True, options=QWEN3),
    "nemotron": Row(scores_prompts=True),
    "idlm": Row(32, scores_prompts=True),
    "wedlm": Row(),
    "llada2.2": Row(),
}


class Served(NamedTuple):
    """A server and what its family serves."""

    row: Row
    server: Server

    def chat(self, **more: Any) -> dict[str, Any]:
        """The only choice of a chat, greedy unless asked otherwise."""
        body = {"temperature": 0, "return_token_ids": True} | CHAT | more
        reply = self.server.post("chat/completions", body)
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        return dict(choice)

    def streamed_call(self, asked: dict[str, Any]) -> tuple[str, str]:
        """Name and arguments of the only tool call of a greedy stream."""
        name = arguments = ""
        for chunk in self.server.stream("chat/completions", asked):
            for choice in chunk["choices"]:
                for piece in choice["delta"].get("tool_calls") or ():
                    name += piece["function"].get("name") or ""
                    arguments += piece["function"].get("arguments") or ""
        return name, arguments

    def check_no_gaps(self, wanted: str, path: str, **body: Any) -> None:
        """Check that a family that attends causally refuses what is wanted."""
        why = f"{wanted} needs a model that sees the text after a gap; "
        assert why in self.refusal(path, **body)

    def refusal(self, path: str = "chat/completions", **body: Any) -> str:
        reply = self.server.post(path, body)
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["message"])


@pytest.fixture(scope="module", params=list(ROWS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    row, model = ROWS[request.param], CHECKPOINTS / f"tiny-{request.param}"
    options = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    options += row.options
    if row.canvas is not None:
        options.append(
            f'--additional-config={{"dllm": {{"canvas_length": {row.canvas}}}}}'
        )
    log = tmp_path_factory.mktemp("family") / "log"
    with serving(log, *options, model=model, **INSIDE) as server:
        yield Served(row, server)


def test_a_stream_equals_the_whole_answer(served: Served) -> None:
    whole = served.chat()
    assert len(whole["token_ids"]) == 20 or whole["finish_reason"] == "stop"
    streamed: list[int] = []
    for chunk in served.server.stream(
        "chat/completions", CHAT | {"return_token_ids": True}
    ):
        for choice in chunk["choices"]:
            streamed += choice.get("token_ids") or []
    assert streamed == whole["token_ids"]


def test_seeds_and_scores(served: Served) -> None:
    answers = []
    for seed in (7, 7, 8):
        answers.append(served.chat(temperature=1.0, seed=seed)["token_ids"])
    assert answers[0] == answers[1] != answers[2]
    asked = {"logprobs": True, "top_logprobs": 2}
    choice = served.chat(**asked)
    scored = choice["logprobs"]["content"]
    assert len(scored) == len(choice["token_ids"])
    for place in scored[:-1]:  # the last one of RND1 is given
        assert place["logprob"] <= 0 and len(place["top_logprobs"]) == 2


def test_echoed_prompts_have_scores(served: Served) -> None:
    """If a causal forward computes them, as vLLM's models do."""
    body = {"prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body |= {"echo": True, "logprobs": 1}
    if not served.row.scores_prompts:
        reason = "prompt_logprobs is not supported by diffusion decoding: rows"
        assert reason in served.refusal("completions", **body)
        return
    reply = served.server.post("completions", body)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    assert choice["text"].startswith("one two")
    first, *others = choice["logprobs"]["token_logprobs"]
    prompt_tokens = reply.json()["usage"]["prompt_tokens"]
    assert first is None and len(others) == prompt_tokens + 4 - 1
    assert all(score <= 0 for score in others)


def test_grammars(served: Served) -> None:
    asked = {"structured_outputs": {"regex": REGEX}, "ignore_eos": False}
    choice = served.chat(**asked)
    text = choice["message"]["content"]
    pattern = REGEX if choice["finish_reason"] == "stop" else r"[a-e]{4,9};[0-9]*"
    assert re.fullmatch(pattern, text), text


def test_a_tool_call_streams(served: Served) -> None:
    tools = {"tools": [{"type": "function", "function": TOOL}], "max_tokens": 110}
    tools["tool_choice"] = {"type": "function", "function": {"name": "count"}}
    name, arguments = served.streamed_call(CHAT | tools | {"ignore_eos": False})
    assert name == "count" and list(json.loads(arguments)) == ["n"]


def test_a_tool_call_of_the_text(served: Served) -> None:
    """By the parser: nobody chose the tool, and the grammar only stands for training."""
    call = r'<tool_call>\n{"name": "count", "arguments": {"n": [1-3]}}\n</tool_call>'
    text = call.replace("{", r"\{").replace("}", r"\}")
    tools = [{"type": "function", "function": TOOL}]
    asked = CHAT | {"tools": tools, "max_tokens": 110, "ignore_eos": False}
    asked |= {"temperature": 0, "structured_outputs": {"regex": text}}
    choice = served.chat(**asked)
    [found] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    name, arguments = served.streamed_call(asked)
    assert name == found["function"]["name"] == "count"
    assert json.loads(arguments) == json.loads(found["function"]["arguments"])


def test_thoughts_of_the_text(served: Served) -> None:
    """Whole and streamed; what ends them is given amid two gaps."""
    if not served.row.options:
        pytest.skip("no card names a parser")
    asked = CHAT | {"chat_template_kwargs": {"enable_thinking": True}}
    template = [BEGIN_THINKING, *[-1] * 6, END_THINKING, *[-1] * 9]
    asked |= {"max_tokens": len(template), "temperature": 0}
    asked |= {"vllm_xargs": {"dllm_template": template}}
    whole = served.chat(**asked)["message"]
    assert whole["reasoning"] and whole["content"]
    assert "think>" not in whole["reasoning"] + whole["content"]
    thought = said = ""
    for chunk in served.server.stream("chat/completions", asked):
        for choice in chunk["choices"]:
            thought += choice["delta"].get("reasoning") or ""
            said += choice["delta"].get("content") or ""
    assert (thought, said) == (whole["reasoning"], whole["content"])


def test_suffixes_and_likelihoods(served: Served) -> None:
    """A text before a given end, and how likely a given text is."""
    pair = {"context": "one two", "continuation": " three"}
    asked = {"pairs": [pair], "method": "left_to_right"}
    body = {"prompt": "one two", "max_tokens": 6, "temperature": 0}
    if not served.row.has_gaps:
        served.check_no_gaps("likelihood", "likelihood", **asked)
        served.check_no_gaps("suffix", "completions", **body, suffix=" three")
        return
    texts = []
    for suffix in (" three", "!!!"):
        reply = served.server.post("completions", body | {"suffix": suffix})
        assert reply.status_code == 200, reply.text
        texts.append(reply.json()["choices"][0]["text"])
    assert texts[0] != texts[1], "the suffix is seen"
    told = served.server.post("likelihood", asked).json()
    [result] = told["results"]
    assert result["logprob"] < 0
    assert told["metrics"]["diffusion"]["forwards"] == result["tokens"]


def test_gaps(served: Served) -> None:
    body = {"text": "one [MASK:5] three", "temperature": 0}
    if not served.row.has_gaps:
        served.check_no_gaps("infill", "infill", **body)
        return
    reply = served.server.post("infill", body)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    assert choice["text"].startswith("one ") and choice["text"].endswith(" three")


def test_what_is_refused_is_named(served: Served) -> None:
    wrong = {"vllm_xargs": {"dllm_block_length": 0}}
    assert "dllm_block_length" in served.refusal(**CHAT, **wrong)
    unknown = {"vllm_xargs": {"dllm_stepz": 3}}
    assert "dllm_stepz" in served.refusal(**CHAT, **unknown)


def test_thinking_streams_apart_from_the_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """At the marker that a budget writes, as vLLM's parser divides any text."""
    log = tmp_path_factory.mktemp("thinking") / "log"
    parser, model = "--reasoning-parser=deepseek_r1", CHECKPOINTS / "tiny-nemotron"
    with serving(log, parser, model=model) as server:
        served = Served(Row(), server)
        budget = {"dllm_max_thinking_tokens": 6, "dllm_end_think_token_id": 13}
        asked = CHAT | {"temperature": 0, "vllm_xargs": budget}
        whole = served.chat(**asked)["message"]
        assert whole["reasoning"] and whole["content"]
        thought = said = ""
        for chunk in server.stream("chat/completions", asked):
            for choice in chunk["choices"]:
                thought += choice["delta"].get("reasoning") or ""
                said += choice["delta"].get("content") or ""
    assert (thought, said) == (whole["reasoning"], whole["content"])
    assert "</think>" not in thought + said
