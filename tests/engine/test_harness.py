"""lm-evaluation-harness with our model class, against a server of the bundled model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import ROOT
from processes import INSIDE, Server, serving

from diffuplug_bench.word_problems.generator import Problem, problems_of
from dllm_plugin import default_model

PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
HARNESS = ROOT / "examples" / "lm_eval_model.py"
pytestmark = pytest.mark.slow

COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
"""
TASKS = {
    "two_choices": """
task: two_choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "answers": """
task: answers
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{result}}"
generation_kwargs:
  max_gen_toks: 128
  until: ["<|eot_id|>"]
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
""",
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{answer}}"
metric_list:
  - metric: bits_per_byte
  - metric: byte_perplexity
""",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if subprocess.run([PYTHON, "-c", "import lm_eval"], capture_output=True).returncode:
        pytest.skip("lm_eval is not installed")
    log, model = tmp_path_factory.mktemp("harness") / "log", Path(default_model.path())
    options = '--additional-config={"dllm": {"strategy": "dual_cache"}}'
    length = "--max-model-len=512"
    with serving(log, options, length, model=model, **INSIDE) as server:
        yield server


def asked(question: str) -> str:
    """The question as the chat template writes it."""
    opened = "<|start_header_id|>{}<|end_header_id|>\n\n"
    user, assistant = opened.format("user"), opened.format("assistant")
    return f"<|startoftext|>{user}{question}<|eot_id|>{assistant}"


def row(one: Problem, number: int) -> dict[str, Any]:
    """A problem with its answer and one that ends with another number, in either order."""
    wrong = one.answer.replace(f"#### {one.result}", f"#### {one.result + 10}")
    choices, label = [one.answer, wrong], number % 2
    return {
        "question": asked(one.question),
        "choices": choices[::-1] if label else choices,
        "label": label,
        "result": str(one.result),
        "answer": one.answer,
    }


@pytest.fixture(scope="module")
def results(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the harness reports of all tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [row(one, number) for number, one in enumerate(problems_of(10))]
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            task + COMMON.format(data=folder / "data.jsonl")
        )
    address = f"base_url={server.url},samples=16,num_concurrent=2,greedy=False"
    words = [
        "--model",
        "diffuplug",
        "--model_args",
        address,
        "--tasks",
        ",".join(TASKS),
    ]
    words += ["--include_path", str(folder), "--output_path", str(folder / "out")]
    done = subprocess.run(
        [PYTHON, str(HARNESS), *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"HF_HOME": str(folder / "hf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [report] = (folder / "out").rglob("results*.json")
    return dict(json.loads(report.read_text())["results"])


def test_two_choices(results: dict[str, Any]) -> None:
    """Ten of ten: the right number is the likelier one, wherever it stands."""
    assert results["two_choices"]["acc,none"] == 1.0


def test_generated_answers(results: dict[str, Any]) -> None:
    assert results["answers"]["exact_match,number"] == 1.0


def test_rolling_likelihoods(results: dict[str, Any]) -> None:
    """Fewer bits than a byte has; without the questions, names and numbers are anybody's guess."""
    assert 0 < results["rolling"]["bits_per_byte,none"] < 8
