"""The viewer's page: nothing from elsewhere, and its parser and painter of frames in node."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from dllm_plugin.api.viewer import page

needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed"
)


def test_the_page_is_one_file_of_our_own() -> None:
    text, policy = page()
    assert len(text.encode()) < 40_000
    assert not re.search(r"""(src|href)\s*=\s*["'](?:https?:)?//""", text)
    assert "innerHTML" not in text and "Storage" not in text and "eval(" not in text
    assert " style=" not in text and not re.search(r"\son\w+=", text)
    assert (
        len(re.findall(r"'sha256-[\w+/]{43}='", policy)) == 2 and "unsafe" not in policy
    )


def in_node(expression: str) -> Any:
    """The value of an expression over the functions of the page."""
    [script] = re.findall("<script>(.*?)</script>", page()[0], re.DOTALL)
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
            "tokens": ["x", " is ", "y"],
            "steps": [3, 0, 1],
            "confidences": [0.5, None, 0.9],
        }
    }
}


@needs_node
@pytest.mark.parametrize(
    ("answers", "lead"), [("false", "The "), ("true", "")], ids=["text", "answer"]
)
def test_an_infill_becomes_frames(answers: str, lead: str) -> None:
    """What is given stands in the first one; an answer's first part is among its tokens."""
    text = json.dumps("The [MASK:1] is [MASK:1,2]!")
    frames = in_node(f"framesOfInfill({text}, {answers}, {json.dumps(INFILLED)})")
    assert [(frame["forward"], frame["set"]) for frame in frames] == [
        (0, [[0, lead, None], [4, "!", None], [2, " is ", None]]),
        (1, [[3, "y", 0.9]]),
        (3, [[1, "x", 0.5]]),
    ]
    assert [(frame["length"], frame["final"]) for frame in frames] == [
        (5, 0),
        (5, 0),
        (5, 5),
    ]
