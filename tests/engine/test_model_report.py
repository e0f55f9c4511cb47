"""Write the report of the bundled model, and of a model that cannot run."""

import json
import re
from pathlib import Path

import pytest
from forked import PYTHON

from diffuplug_bench import model_report
from dllm_plugin.commands import cli

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands in forks, which need not import vLLM."""
    monkeypatch.setattr(model_report, "COMMAND", (PYTHON, *model_report.COMMAND[1:]))


def test_the_report_of_the_bundled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "report.md"
    words = ["--limit", "8", "--gpu-memory-utilization", "0.2"]
    assert cli.main(["report", *words, "--output", str(output)]) == 0
    assert f"written to {output}" in capsys.readouterr().out
    text = output.read_text(encoding="utf-8")
    (record,) = re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = json.loads(record)
    assert found["installation"]["vllm"]
    (verified,) = found["verify"]["records"]
    assert len(verified["prompts"]) == 3
    (scored,) = found["eval"]["records"]
    assert scored["problems"] == 8 and scored["rows"]["as set"]["accuracy"] > 0.8
    (timed,) = found["bench"]["records"]
    assert timed["gate"] == "green" and timed["step"]
    for command in ("doctor", "verify", "eval", "bench"):
        assert f"## diffuplug {command}\n" in text


def test_a_part_that_fails_is_part_of_the_report(tmp_path: Path) -> None:
    part = model_report.run_part(["eval", "--questions", str(tmp_path / "none")])
    assert part.status == 2 and "No such file" in part.text
    page = model_report.page("x", [part])
    assert '"status": 2' in page and "diffuplug: error:" in page


def test_wrong_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        model_report.main(["--output", str(tmp_path / "none" / "report.md")])
