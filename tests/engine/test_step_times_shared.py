"""Engines of data parallelism: every one finds the first rank's times of steps."""

import subprocess
from pathlib import Path

import pytest
from forked import PYTHON
from step_times_rank import measured
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

from dllm_plugin.config.step_times import StepTimes, load, save

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

SECONDS = 120
RANK = Path(__file__).parent / "step_times_rank.py"
EARLIER = StepTimes((1,), (9.0,), 0.0)


def test_all_engines_have_the_same_times(tmp_path: Path) -> None:
    """This process is no rank, for it may be one of an engine already."""
    path, other = tmp_path / "times.json", tmp_path / "times-1.json"
    meeting = get_distributed_init_method("127.0.0.1", get_open_port())
    save(other, EARLIER)
    ranks = [
        subprocess.Popen([PYTHON, str(RANK), str(i), meeting, str(path)])
        for i in range(2)
    ]
    assert [rank.wait(SECONDS) for rank in ranks] == [0, 0]
    assert load(path) == load(other) == measured(0)
