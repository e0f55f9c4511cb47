"""Run ``diffuplug report MODEL``: one file about a checkpoint on this machine, to keep or send.

It runs four of our commands, each in a process of its own, and writes what they print: what is
installed and what fits, tokens against a second implementation, right answers, and the time of
steps beside their floor.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin.commands.installation import installation
from dllm_plugin.commands.models import check_model, resolve
from dllm_plugin.commands.options import (
    Parser,
    add_count,
    add_flags,
    add_memory_share,
    add_model,
    add_value,
)

LIMIT, VERIFIED = 100, 3
COMMAND = (sys.executable, "-m", "dllm_plugin.commands.cli")


@dataclass
class Part:
    """Store what one command printed.

    Attributes:
        words: the command after ``diffuplug``.
        status: its exit status.
        seconds: how long it ran.
        text: its standard output; of a failure, our sentence too.
    """

    words: list[str]
    status: int
    seconds: float
    text: str

    def records(self) -> list[dict[str, Any]]:
        """Return the JSON lines of the output."""
        lines = self.text.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def build_parser() -> Parser:
    """Build the parser of the command."""
    words = "Write one file about a checkpoint on this machine."
    parser = Parser(prog="diffuplug report", description=words)
    add_model(parser)
    words = "JSON lines with question and answer (default: word problems)"
    add_value(parser, "--questions", "FILE", words)
    add_count(parser, "--limit", f"of questions (default: {LIMIT})", default=LIMIT)
    words = "file (default: report-MODEL.md in this folder)"
    add_value(parser, "--output", "FILE", words, type=Path)
    add_memory_share(parser)
    add_flags(parser, ("allow_unverified",))
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the report; 0 if every part of it succeeded, else 1. Raises ValueError."""
    args = build_parser().parse(arguments)
    named = args.model
    if args.questions is not None and not Path(args.questions).is_file():
        raise ValueError(f"--questions {args.questions} is no file")
    of_model = []
    if named is not None:
        of_model = ["--model", resolve(named)]
        check_model(of_model[1])
    if args.allow_unverified:
        of_model.append("--allow-unverified")
    of_engine = [*of_model]
    if args.gpu_memory_utilization is not None:
        of_engine += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
    name = re.sub(r"[^\w.-]+", "-", named or "bundled").strip("-")
    output = args.output or Path(f"report-{name}.md")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        questions = args.questions or _write_problems(Path(folder), args.limit)
        for words in (
            ["doctor", *of_model],
            ["verify", *of_engine, "--limit", str(VERIFIED)],
            ["eval", *of_engine, "--questions", questions, "--limit", str(args.limit)],
            ["bench", "step", *of_engine],
        ):
            parts.append(run_part(words))
            print(f"{words[0]}: {parts[-1].seconds:.0f} s", flush=True)
    output.write_text(page(named or "the bundled model", parts), encoding="utf-8")
    print(f"written to {output}")
    return int(any(part.status for part in parts))


def _write_problems(folder: Path, limit: int) -> str:
    """Write our word problems as a file of questions; return its path."""
    lines = []
    for asked in problems_of(limit):
        lines.append(json.dumps({"question": asked.question, "answer": asked.answer}))
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run_part(words: list[str]) -> Part:
    """Run one of our commands to its end."""
    began = time.monotonic()
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    text = done.stdout
    if done.returncode:
        errors = done.stderr.splitlines()
        text += "\n".join(line for line in errors if line.startswith("diffuplug:"))
    return Part(words, done.returncode, time.monotonic() - began, text)


def page(name: str, parts: Sequence[Part]) -> str:
    """Format the report: one JSON object, then the output of each command."""
    record = {"model": name, "installation": installation()}
    for part in parts:
        record[part.words[0]] = {
            "status": part.status,
            "seconds": round(part.seconds, 1),
            "records": part.records(),
        }
    blocks = [f"# Report of {name}", _block("json", json.dumps(record, indent=1))]
    for part in parts:
        blocks.append(f"## diffuplug {part.words[0]}")
        blocks.append(_block("text", part.text.rstrip()))
    return "\n\n".join(blocks) + "\n"


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
