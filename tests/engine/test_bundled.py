"""The bundled model through the real engine, as README and the command line use it."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from documented import blocks, example_of
from engines import CHECKPOINTS
from forked import PYTHON

from diffuplug_bench.word_problems.generator import eval_seeds, problem
from dllm_plugin.commands.phases import FIRST, MARKERS

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]


def run(*command: str, **variables: str) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def readme_command(name: str) -> list[str]:
    """A command of README, as words that run it."""
    [command] = [
        line
        for block in blocks("bash")
        for line in block.text.splitlines()
        if block.page == "README.md" and line.startswith(f"diffuplug {name}")
    ]
    return [PYTHON, "-m", "dllm_plugin.commands.cli", *shlex.split(command)[1:]]


def test_readme_example(tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(example_of("README.md"))
    # By Python itself: one of the tests that no fork could stand in for.
    output = run(sys.executable, str(program))
    assert re.search(r"#### 29\n", output)
    assert re.search(r"^\d+ tokens in \d+ forwards$", output, re.MULTILINE)


def test_replay_of_a_trace(tmp_path: Path) -> None:
    """The example of docs/http-api.md: every token once, in the step that decided it."""
    program = tmp_path / "replay.py"
    program.write_text(example_of("http-api.md"))
    lines = re.findall(
        r"^(\d+) (\[.*\]) (\[.*\]) (-?[\d.]+)$", run(PYTHON, str(program)), re.M
    )
    assert [int(step) for step, *_ in lines] == list(range(1, len(lines) + 1))
    places = [place for _, decided, *_ in lines for place in json.loads(decided)]
    assert sorted(places) == list(range(len(places))) and len(places) > 3 * len(lines)
    assert all(len(json.loads(a)) == len(json.loads(b)) for _, a, b, _ in lines)


COMPILED = """
from vllm import LLM, SamplingParams
from dllm_plugin.commands.offline import bundled_options

if __name__ == "__main__":
    llm = LLM(**bundled_options({}), compilation_config={"mode": 3})
    question = "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. "
    question += "Omar sells 26 pencils at the market. How many pencils does Omar have now?"
    sampling = SamplingParams(temperature=0, max_tokens=200)
    (output,) = llm.chat([{"role": "user", "content": question}], sampling)
    print(output.outputs[0].text, llm.llm_engine.vllm_config.compilation_config.mode.name)
"""


def test_compiled_if_asked(tmp_path: Path) -> None:
    """What nobody gets any more who asks for nothing."""
    program = tmp_path / "compiled.py"
    program.write_text(COMPILED)
    output = run(PYTHON, str(program), VLLM_USE_AOT_COMPILE="1")  # as for users
    assert re.search(r"#### 29\b", output) and "DYNAMO_TRACE_ONCE" in output


def test_generate_keeps_the_answer_apart(tmp_path: Path) -> None:
    """Standard output holds the answer alone, standard error our phases and no log of vLLM's."""
    done = subprocess.run(
        readme_command("generate"),
        capture_output=True,
        text=True,
        timeout=400,
        # The phases are read from what vLLM logs at INFO, which our tests turn off.
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(tmp_path),
            "VLLM_LOGGING_LEVEL": "INFO",
        },
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^#### 50$", done.stdout, re.MULTILINE)
    *phases, counts = done.stderr.splitlines()
    shown = [re.sub(r"^\[ *\d+ s\] ", "", line) for line in phases]
    assert shown == [FIRST, *MARKERS.values(), "ready"]
    assert re.match(
        r"\d+ tokens, \d+ forwards, [\d.]+ tokens per forward, [\d.]+ sec", counts
    )
    assert not list(tmp_path.glob("diffuplug-*.log"))


def test_a_gap_in_a_worked_solution() -> None:
    """README's own command: of four lengths the right one is taken, and scores are told."""
    words = readme_command("infill")
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "With the pencils from Anna, Omar has 7 + 48 = 55 pencils.\n"
    scores = re.findall(r"length (\d): score (-[\d.]+)", done.stderr)
    assert [length for length, _ in scores] == ["1", "2", "3", "4"]
    assert max(scores, key=lambda pair: float(pair[1]))[0] == "2"


def is_list_of_integers(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found, list) and all(type(item) is int for item in found)


FORMS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "--json-schema": (
        '{"type": "array", "items": {"type": "integer"}}',
        is_list_of_integers,
    ),
    "--regex": (
        "[4-6]{2,4}",
        lambda text: re.fullmatch("[4-6]{2,4}", text) is not None,
    ),
    "--choice": (
        "forty,fifty-five,six",
        lambda text: text in ("forty", "fifty-five", "six"),
    ),
}


@pytest.mark.parametrize("option", FORMS)
def test_generate_in_a_given_form(option: str) -> None:
    given, judge = FORMS[option]
    question = "Anna has 48 pencils and loses 5. How many pencils does Anna have now?"
    command = [PYTHON, "-m", "dllm_plugin.commands.cli", "generate", question]
    output = run(*command, "--max-tokens", "24", option, given)
    assert judge(output.removesuffix("\n")), output


def test_accuracy_and_tokens_per_forward() -> None:
    output = run(PYTHON, "-m", "dllm_plugin.commands.cli", "eval", "--limit", "8")
    rows = json.loads(output.strip().splitlines()[-1])["rows"]
    base, d2f = rows["one token per step"], rows["D2F, threshold 0.9"]
    assert base["accuracy"] >= 0.95 and base["tokens_per_forward"] <= 1
    assert d2f["accuracy"] >= 0.95 and d2f["tokens_per_forward"] >= 3
    assert base["positions_per_token"] > d2f["positions_per_token"] > 1


def test_every_policy_of_a_strategy() -> None:
    program = (
        "import json; from diffuplug_bench.eval.every_policy import score_strategy;"
        "rows = score_strategy('dual_cache', 'auto', 1);"
        "print(json.dumps([row._asdict() for row in rows]))"
    )
    rows = json.loads(run(PYTHON, "-c", program).strip().splitlines()[-1])
    one_token = [row for row in rows if row["steps"] == 64]
    free = [row for row in rows if row["steps"] is None]
    assert len(one_token) == 4 and len(free) == 2
    for row in one_token:
        assert (
            row["tokens_per_forward"]
            <= 1
            < min(other["tokens_per_forward"] for other in free)
        )
        # At least what each forward computes, at most prompt and canvas every time.
        assert 64 < row["positions_per_token"] * row["tokens_per_forward"] < 200
    assert {row["policy"]: row["accuracy"] for row in one_token}["low_confidence"] == 1


def test_refreshes_that_cost_less() -> None:
    program = (
        "import json; from diffuplug_bench.eval.refreshes import score_strategy;"
        "rows = score_strategy('dual_cache', 'auto', 6);"
        "print(json.dumps([row._asdict() for row in rows]))"
    )
    rows = json.loads(run(PYTHON, "-c", program).strip().splitlines()[-1])
    exact, *others = (row for row in rows if row["questions_per_prompt"] == 1)
    assert (
        exact["options"] == {} and exact["same_text"] == 1 and exact["accuracy"] >= 0.8
    )
    assert all(
        row["positions_per_token"] < exact["positions_per_token"] for row in others
    )
    long = [row for row in rows if row["questions_per_prompt"] == 3]
    assert long[0]["prompt_tokens"] > 2 * exact["prompt_tokens"]


def test_accuracy_by_width(tmp_path: Path) -> None:
    """Of the bundled model's problems, and of questions in a file."""
    command = [PYTHON, "-m", "dllm_plugin.commands.cli", "eval", "--schedule", "32,2"]
    output = run(*command, "--limit", "6")
    record = json.loads(output.strip().splitlines()[-1])
    wide, narrow = record["rows"]["32"], record["rows"]["2"]
    assert wide["accuracy"] >= 0.8 and wide["tokens_per_forward"] >= 3
    assert narrow["tokens_per_forward"] <= 1.01
    asked = problem(eval_seeds(1)[0])
    lines = [
        {"question": asked.question, "answer": a} for a in (asked.answer, "none of it")
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = run(*command[:-1], "8", "--questions", str(tmp_path / "q.jsonl"))
    assert json.loads(output.strip().splitlines()[-1])["rows"]["8"]["accuracy"] == 0.5


class Hub(BaseHTTPRequestHandler):
    """Serve a tiny checkpoint as a hub does, and keep what is asked of it."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.reply()

    def do_GET(self) -> None:
        self.reply()

    def reply(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path} {self.headers['Range']}")
        file = CHECKPOINTS / "tiny-sdar" / path.rpartition("/")[2]
        names = [{"rfilename": one.name} for one in file.parent.iterdir()]
        body = json.dumps(
            {"id": "some/sdar", "sha": COMMIT, "siblings": names}
        ).encode()
        status = 200
        if "/tree/" in path:
            body = b"[]"
        elif "/resolve/" in path:
            status = 200 if file.is_file() else 404
            body = file.read_bytes() if file.is_file() else b""
        self.send_response(status)
        self.send_header("ETag", f'"{file.name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Error-Code", "EntryNotFound" if status == 404 else "")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


COMMIT = "a" * 40


def test_doctor_of_a_model_on_the_hub(tmp_path: Path) -> None:
    """It says whether the model fits; weights are not fetched, but for a header."""
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    variables = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    # Not by a fork, which would have read the variables of its parent.
    command = [sys.executable, "-m", "dllm_plugin.commands.cli", "doctor", "some/sdar"]
    try:
        output = run(*command, **variables)
    finally:
        hub.shutdown()
        hub.server_close()
    assert "family sdar" in output
    assert re.search(r"^  fits: +\d+ such requests at once", output, re.M)
    weights = [one for one in Hub.asked if "GET" in one and ".safetensors" in one]
    assert weights and all("bytes=0-" in one for one in weights)


def test_doctor_says_which_width_a_load_would_get() -> None:
    doctor = [PYTHON, "-m", "dllm_plugin.commands.cli", "doctor"]
    command = [*doctor, "--strategy", "d2f", "--requests"]
    found = [
        int(
            re.search(
                r"^width: +(\d+) of 4 to 128, with adaptive$", run(*command, n), re.M
            )[1]
        )  # type: ignore[index]
        for n in ("1", "256")
    ]
    assert found[0] > found[1] >= 4
    refused = run(*command, "8", "--strategy", "dual_cache")
    assert re.search(
        r"^width: +none: adaptive 'throughput' needs a strategy", refused, re.M
    )
    timed = run(
        *command,
        "64",
        "--context",
        "2048",
        "--acceptance",
        "0.9:2.5",
        "--step-ms",
        "4.6",
    )
    assert re.search(r"^  tokens/s: +[\d.]+ \(at width 128: [\d.]+\)$", timed, re.M)
