"""Clients that fill in the middle: those of Mistral and OpenAI, litellm, and an editor."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from documented import ROOT
from processes import Server

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
QUESTION = (
    "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. "
    "Omar sells 26 pencils at the market. How many pencils does Omar have now?"
)
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
PROMPT = (
    f"{HEAD.format('user')}{QUESTION}<|eot_id|>{HEAD.format('assistant')}"
    "With the pencils from Anna, Omar has 7 + 48 = "
)
SUFFIX = " pencils.\nNow Omar has 55 - 26 = 29 pencils left.\n#### 29"
FILL = "55"
[GIVEN, PROGRAM] = re.findall(
    r"<!-- test: (?:question|mistralai, filling) -->\n```python\n(.*?)^```$",
    (ROOT / "docs" / "clients.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
PROGRAMS = {
    "litellm": """
import litellm
answer = litellm.text_completion(
    model="text-completion-openai/diffuplug", api_base="URL/v1", api_key="none", prompt=PROMPT,
    suffix=SUFFIX, max_tokens=2, temperature=0,
)
""",
    "openai": """
from openai import OpenAI
answer = OpenAI(base_url="URL/v1", api_key="none").completions.create(
    model="diffuplug", prompt=PROMPT, suffix=SUFFIX, max_tokens=2, temperature=0,
)
""",
}


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


def run(program: str, package: str) -> str:
    found = subprocess.run(
        [PYTHON, "-c", f"import {package}"], capture_output=True, text=True
    )
    if "ModuleNotFoundError" in found.stderr:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_client_of_mistral(server: Server) -> None:
    """`fim.complete` and `fim.stream`, as docs/clients.md has them."""
    printed = run(
        GIVEN + PROGRAM.replace("http://localhost:8000", server.url),
        "mistralai.client",
    )
    assert printed == f"{FILL}\n{FILL}\nlength\n"


@pytest.mark.parametrize("package", PROGRAMS)
def test_a_suffix(server: Server, package: str) -> None:
    program = PROGRAMS[package].replace("URL", server.url)
    given = f"PROMPT, SUFFIX = {PROMPT!r}, {SUFFIX!r}"
    shows = "print(answer.choices[0].text, end='')"
    assert run(f"{given}\n{program}\n{shows}", package) == FILL


def test_what_continue_sends(server: Server) -> None:
    """An editor's completion: streamed, with stops, and `delta` or `text` read."""
    body: dict[str, Any] = {
        "model": "diffuplug",
        "prompt": PROMPT,
        "suffix": SUFFIX,
        "max_tokens": 2,
        "temperature": 0,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stop": ["<|end|>", "\n\n"],
        "stream": True,
    }
    pieces: dict[str, str] = {"text": "", "content": ""}
    url = f"{server.url}/v1/fim/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            pieces["text"] += choice["text"]
            pieces["content"] += choice["delta"]["content"]
    assert pieces == {"text": FILL, "content": FILL}
    penalty = {"presence_penalty": 1.5, "stream": False}
    reply = server.post("fim/completions", body | penalty)
    assert reply.status_code == 200, reply.text
