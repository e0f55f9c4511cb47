"""Programs of docs/clients.md, and requests as chat programs send them, on the bundled model.

`CLIENTS_PYTHON` may name the interpreter of another environment that has the clients: what they pin
need not agree with what vLLM pins.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from documented import ROOT
from processes import Server

from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model

PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
BLOCKS = re.findall(
    r"<!-- test: ([\w.]+) -->\n```python\n(.*?)^```$",
    (ROOT / "docs" / "clients.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
GIVEN = dict(BLOCKS)["question"]
PROGRAMS = [row for row in BLOCKS if row[0] != "question"]
QUESTION = (
    "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. "
    "Omar sells 26 pencils at the market. How many pencils does Omar have now?"
)


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


def run(program: str) -> str:
    done = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def skip_without(package: str) -> None:
    found = subprocess.run(
        [PYTHON, "-c", f"import {package}"], capture_output=True, text=True
    )
    if "ModuleNotFoundError" in found.stderr:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(
    "package,program", PROGRAMS, ids=[name for name, _ in PROGRAMS]
)
def test_program(package: str, program: str, server: Server) -> None:
    skip_without(package)
    whole = GIVEN + program.replace("http://localhost:8000", server.url)
    assert re.search(r"#### 29\b", run(whole))


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 4


# What the programs of the page leave out. Each says the same in several ways of asking.
COMPARED = {
    "openai": """
from openai import OpenAI
client = OpenAI(base_url=URL, api_key="none")
asked = {"model": "diffuplug", "messages": [{"role": "user", "content": QUESTION}], "n": 3}
asked |= {"max_tokens": 96, "temperature": 2.0, "seed": 5}
whole = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
assert all(whole), whole
for extra in ({}, {"frames": True}, {"frames": {"every": 2}, "early_text": True}):
    read = ["", "", ""]
    stream = client.chat.completions.create(**asked, stream=True, extra_body={"diffusion": extra})
    for chunk in stream:
        for choice in chunk.choices:
            read[choice.index] += choice.delta.content or ""
    assert read == whole, (extra, read, whole)
""",
    "langchain_openai": """
from langchain_openai import ChatOpenAI
def chat(**more):
    asked = {"base_url": URL, "api_key": "none", "model": "diffuplug", "max_tokens": 128}
    return ChatOpenAI(**asked, temperature=0, **more)
whole = chat().invoke(QUESTION).content
for extra in (None, {"diffusion": {"frames": True}}):
    pieces = list(chat(stream_usage=True, extra_body=extra).stream(QUESTION))
    assert "".join(piece.content for piece in pieces) == whole
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 20
""",
    "llama_index.llms.openai_like": """
from llama_index.llms.openai_like import OpenAILike
asked = {"api_base": URL, "api_key": "none", "model": "diffuplug", "max_tokens": 96}
turn = "<|start_header_id|>%s<|end_header_id|>\\n\\n"
prompt = turn % "user" + QUESTION + "<|eot_id|>" + turn % "assistant"
for is_chat_model, asks in ((True, QUESTION), (False, prompt)):
    llm = OpenAILike(**asked, temperature=0, is_chat_model=is_chat_model)
    whole = llm.complete(asks).text
    read = "".join(piece.delta for piece in llm.stream_complete(asks))
    assert "29" in whole and read == whole, (is_chat_model, whole, read)
""",
    "litellm": """
import litellm
asked = {"api_base": URL, "api_key": "none", "max_tokens": 96, "temperature": 0}
asked["messages"] = [{"role": "user", "content": QUESTION}]
whole = litellm.completion("openai/diffuplug", **asked).choices[0].message.content
extra = {"diffusion": {"frames": True}}
stream = litellm.completion("openai/diffuplug", **asked, stream=True, extra_body=extra)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
""",
}


@pytest.mark.parametrize("package", COMPARED)
def test_the_same_text_however_asked(package: str, server: Server) -> None:
    """Whole and in a stream, with frames and without."""
    skip_without(package)
    run(f"URL, QUESTION = {server.url + '/v1'!r}, {QUESTION!r}\n{COMPARED[package]}")


def events(server: Server, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Text of a streamed chat, and its raw lines."""
    text, lines = "", []
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line for line in reply.iter_lines() if line]
    for line in lines[:-1]:
        for choice in httpx.Response(200, content=line.removeprefix("data: ")).json()[
            "choices"
        ]:
            text += choice["delta"].get("content") or ""
    assert lines[-1] == "data: [DONE]"
    return text, lines


def test_what_open_webui_sends(server: Server) -> None:
    """A chat with usage, and behind it the request for a title."""
    body = {
        "stream": True,
        "model": "diffuplug",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 128,
        "stream_options": {"include_usage": True},
    }
    text, lines = events(server, body)
    assert re.search(r"#### 29\b", text) and '"usage":{' in lines[-2]
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": text},
    ]
    task = {
        "role": "user",
        "content": "Create a concise, 3-5 word title of this chat as JSON.",
    }
    title = {"model": "diffuplug", "messages": [*history, task], "stream": False}
    reply = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=title | {"max_completion_tokens": 40},
        timeout=120,
    )
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["role"] == "assistant"


def test_what_aider_sends(server: Server) -> None:
    """System prompt and examples before the question, no stop string, no limit of tokens."""
    body = {
        "model": "diffuplug",
        "messages": [
            {"role": "system", "content": "Act as an expert software developer."},
            {"role": "user", "content": "Change the greeting."},
            {
                "role": "assistant",
                "content": "hello.py\n<<<<<<< SEARCH\nhi\n=======\nbye\n",
            },
            {"role": "user", "content": QUESTION},
        ],
        "temperature": 0,
        "stream": True,
    }
    text, lines = events(server, body)
    assert text and '"finish_reason":"' in lines[-2]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_penalties(server: Server, path: str) -> None:
    """Neutral ones change nothing, others do; values out of range are vLLM's errors."""
    turn = {"role": "user", "content": QUESTION}
    text = {"prompt": QUESTION} if path == "completions" else {"messages": [turn]}
    body = {"model": "diffuplug", "max_tokens": 48, "temperature": 0} | text

    def ask(**more: float) -> Any:
        reply = httpx.post(f"{server.url}/v1/{path}", json=body | more, timeout=60)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return choice.get("text") or choice["message"]["content"]

    free = ask()
    assert ask(presence_penalty=0, repetition_penalty=1) == free
    # The model is sure of most tokens.
    assert ask(frequency_penalty=2, repetition_penalty=10) != free
    wrong = body | {"presence_penalty": 2.5}
    reply = httpx.post(f"{server.url}/v1/{path}", json=wrong, timeout=60)
    assert reply.status_code == 400
    assert "presence_penalty must be in [-2, 2]" in reply.text


TASK = """
task: word_problems
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  max_gen_toks: 128
  until: []
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
filter_list:
  - name: number
    filter:
      - function: regex
        regex_pattern: "#### (-?[0-9]+)"
      - function: take_first
"""


def test_lm_evaluation_harness(server: Server, tmp_path: Path) -> None:
    """Ten of its generated answers are right."""
    skip_without("lm_eval")
    problems = problems_of(10)
    rows = [
        json.dumps({"question": p.question, "answer": str(p.result)}) for p in problems
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    address = (
        f"base_url={server.url}/v1/chat/completions,model=diffuplug,num_concurrent=2"
    )
    words = [
        "--model",
        "local-chat-completions",
        "--model_args",
        address,
        "--apply_chat_template",
    ]
    words += ["--tasks", "word_problems", "--include_path", str(tmp_path)]
    done = subprocess.run(
        [PYTHON, "-m", "lm_eval", *words, "--output_path", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OPENAI_API_KEY": "none", "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [report] = (tmp_path / "out").rglob("results*.json")
    results = json.loads(report.read_text())["results"]["word_problems"]
    assert results["exact_match,number"] == 1.0


def test_vllm_bench_serve(server: Server) -> None:
    """vLLM's own benchmark, whose lines about diffusion are what the server counts."""
    shown = {
        "Committed tokens": "committed_tokens",
        "Canvas positions evaluated": "canvas_positions",
    }

    def counted() -> list[int]:
        names = (f"vllm:diffusion_num_{name}_total" for name in shown.values())
        return [int(sum(server.metrics(name).values())) for name in names]

    before = counted()
    options = {
        "backend": "openai",
        "base-url": server.url,
        "endpoint": "/v1/completions",
        "model": "diffuplug",
        "tokenizer": default_model.path(),
        "dataset-name": "random",
        "random-input-len": "32",
        "random-output-len": "32",
        "num-prompts": "20",
        "seed": "3",  # with it no prompt happens to hold the mask token, which is refused
        "ready-check-timeout-sec": "0",
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [
        forked.PYTHON,
        "-m",
        "vllm.entrypoints.cli.main",
        "bench",
        "serve",
        "--ignore-eos",
    ]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=400, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Successful requests: +20\b", done.stdout)
    told = [
        int(re.findall(rf"^{label}: +(\d+)", done.stdout, re.M)[0]) for label in shown
    ]
    assert told == [now - was for now, was in zip(counted(), before, strict=True)]
    assert told[0] >= 20 * 32
