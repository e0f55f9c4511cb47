"""The viewer's page: nothing from elsewhere, and what needs no browser of it in node."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from dllm_plugin.api.viewer import PAGE, page

needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed"
)


def test_the_page_is_one_document_of_our_own() -> None:
    text, policy = page("{}")
    assert len(text.encode()) < 64_000
    assert not re.search(r"""(src|href)\s*=\s*["'](?:https?:)?//""", text)
    assert not re.search(r"(src=|rel=\"stylesheet\"|@import|url\()", text)
    assert "innerHTML" not in text and "Storage" not in text and "eval(" not in text
    assert " style=" not in text and not re.search(r"\son\w+=", text)
    files = [file.name for file in PAGE.iterdir() if file.name != "index.html"]
    hashes = re.findall(r"'sha256-[\w+/]{43}='", policy)
    assert len(hashes) == len(files) and "unsafe" not in policy


def test_facts_cannot_end_their_element() -> None:
    facts = json.dumps({"model": "</script><script>alert(1)</script>"})
    text, _ = page(facts)
    [embedded] = re.findall(r'id="facts">(.*?)</script>', text)
    assert "<" not in embedded and json.loads(embedded) == json.loads(facts)


def in_node(expression: str) -> Any:
    """The value of an expression over the functions that know no page."""
    script = (PAGE / "frames.js").read_text() + (PAGE / "server.js").read_text()
    program = f"{script}\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run(
        ["node", "-e", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_parser_keeps_half_an_event() -> None:
    events = 'data: {"a": "é"}\n\n: comment\n\ndata: {"b": 2}\r\n\r\ndata: [DONE]\n\ndata: {"c"'
    parsed = in_node(f"parseEvents({json.dumps(events)})")
    assert parsed == {"bodies": [{"a": "é"}, {"b": 2}], "rest": 'data: {"c"'}


@needs_node
def test_the_painter_applies_frames() -> None:
    first = {"forward": 2, "start": 0, "length": 4, "final": 0, "unset": []}
    first["set"] = [[1, "b", 0.9], [3, "d", None]]
    second = {"forward": 5, "start": 1, "length": 5, "final": 2, "unset": [3]}
    second["set"] = [[0, "a", 0.8], [1, "B", 0.7]]
    frames = json.dumps([first, second])
    canvas = in_node(
        f"((c) => ({{...c, tokens: [...c.tokens].sort()}}))({frames}.reduce(applyFrame, EMPTY))"
    )
    assert canvas["tokens"] == [
        [0, {"text": "a", "confidence": 0.8, "forward": 5}],
        [1, {"text": "B", "confidence": 0.7, "forward": 2}],
    ]
    assert (canvas["forward"], canvas["length"], canvas["final"]) == (5, 6, 2)
    assert in_node("EMPTY.tokens.size") == 0


INFILLED = {
    "diffusion": {
        "trace": {
            "tokens": ["x", " is ", "y", "END", "z"],
            "steps": [3, 0, 1, 1, 3],
            "confidences": [0.5, None, 0.9, 0.8, 0.7],
        }
    }
}


@needs_node
@pytest.mark.parametrize(
    ("answers", "lead"), [("false", "The "), ("true", "")], ids=["text", "answer"]
)
def test_an_infill_becomes_frames(answers: str, lead: str) -> None:
    """What is given stands in the first one; an answer's first part is among its tokens.

    A gap's text ends at a stop token.
    """
    text = json.dumps("The [MASK:1] is [MASK:1,2]!")
    frames = in_node(
        f"framesOfInfill({text}, {answers}, {json.dumps(INFILLED)}, ['END'])"
    )
    assert [(frame["forward"], frame["set"]) for frame in frames] == [
        (0, [[0, lead, None], [6, "!", None], [2, " is ", None]]),
        (1, [[3, "y", 0.9], [4, "", 0.8]]),
        (3, [[1, "x", 0.5], [5, "", 0.7]]),
    ]
    assert [(frame["length"], frame["final"]) for frame in frames] == [
        (7, 0),
        (7, 0),
        (7, 7),
    ]


@needs_node
def test_any_run_is_shown_for_some_seconds() -> None:
    """Few canvases for a second each, many for five seconds in all; or as they come."""
    assert in_node("delayOf(2, 1)") == 1000 and in_node("delayOf(2, 0.5)") == 2000
    assert in_node("delayOf(40, 1)") == 125 and in_node("delayOf(40, 2)") == 62.5
    assert in_node("delayOf(1000, 1)") == 80 and in_node("delayOf(1000, 0)") == 0


OTHER = {"own": False, "base": "http://localhost:8001/", "model": "", "key": ""}
OWN = {"own": True, "base": "http://localhost:8000/v1/", "model": "", "key": ""}


@needs_node
@pytest.mark.parametrize(
    ("status", "server", "sentence", "field"),
    [
        (401, OWN, "This server asks for a key. Enter", "key"),
        (401, OWN | {"key": "k"}, "This server does not accept this key. Enter", "key"),
        (401, OTHER, "http://localhost:8001 asks for a key. Enter", "other-key"),
        (404, OWN | {"model": "m"}, "Said. Leave the model empty", "model"),
        (404, OTHER | {"model": "m"}, "Said. Leave the model empty", "other-model"),
        (404, OTHER, "http://localhost:8001 is no OpenAI API. Most", "other-url"),
        (400, OWN, "Said.", None),
    ],
)
def test_errors_say_what_to_do(
    status: int, server: dict[str, Any], sentence: str, field: str | None
) -> None:
    advice = in_node(f"adviceOn({status}, 'Said.', {json.dumps(server)})")
    assert advice[0].startswith(sentence) and advice[1] == field


@needs_node
def test_gaps_under_a_strategy_that_cannot_fill_them() -> None:
    """A command where the model can, other models where it cannot."""
    facts = {"fills": False, "strategy": "d2f", "filling": ["dual_cache"]}
    said = in_node(f"refusalOfGaps({json.dumps(facts)})")
    assert said.endswith("Start the server with: diffuplug serve --strategy dual_cache")
    said = in_node(f"refusalOfGaps({json.dumps(facts | {'filling': []})})")
    assert "Serve LLaDA, Dream or DiffuCoder" in said
    assert in_node(f"refusalOfGaps({json.dumps(facts | {'fills': True})})") == ""
