"""Two ranks, and model runner v2, each in processes of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import PYTHON
from omni_models import autoregressive
from processes import KILLED_SOON, end, environment, spawn

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SECONDS = 900


def output_of(command: list[str], **variables: str) -> str:
    """What a process wrote; it is shown if it failed."""
    variables = {"VLLM_LOGGING_LEVEL": "WARNING"} | variables
    process = spawn(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(**variables),
    )
    try:
        text = process.communicate(timeout=SECONDS)[0].decode()
    finally:
        end(process)
    assert process.returncode == 0, text[-6000:]
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omni_denoisers import checkpoint

    root = tmp_path_factory.mktemp("ranks")
    autoregressive(root / "llama", "Llama")
    checkpoint(root / "sample", "sample")
    return root


def results(text: str) -> dict[str, dict[str, Any]]:
    """By rank, what omni_parallel.py printed."""
    lines = [
        line.split(" ", 2) for line in text.splitlines() if line.startswith("RESULT ")
    ]
    return {rank: json.loads(found) for _, rank, found in lines}


def test_two_ranks(folder: Path) -> None:
    """Twenty requests under preemption, tensor-parallel, and a denoiser whose first rank embeds."""
    command = [PYTHON, str(HERE / "omni_parallel.py"), str(folder), "workers"]
    text = output_of(
        command,
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        **KILLED_SOON,
    )
    found = results(text)["0"]
    error, preemptions = found["llama"]
    assert error < 1e-4 and preemptions > 0
    assert found["tensors"] < 1e-5


def segments() -> Iterator[Path]:
    """vLLM names a launcher's segments alike every time, and cannot start where old ones lie."""
    return Path("/dev/shm").glob("-pp:0-*-cpushm_*")


def test_every_rank_of_torchrun_gets_the_rows(folder: Path) -> None:
    """Each rank is an engine of its own; the last stage of the pipeline sends it the rows."""
    launch = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*launch, str(HERE / "omni_parallel.py"), str(folder), "launcher"]
    for segment in segments():
        segment.unlink()
    text = output_of(
        command,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        PYTHON_EXEC=sys.executable,  # what torchrun starts; forks end without C++'s destructors
        GLOO_SOCKET_IFNAME="lo",
        MASTER_PORT="0",
    )
    found = results(text)
    assert sorted(found) == ["0", "1"]
    for rank in found.values():
        error, preemptions = rank["llama"]
        assert error < 1e-4 and preemptions > 0
    assert not list(segments()), "ranks that end by themselves leave none"


def test_model_runner_v2(tmp_path: Path) -> None:
    """What CUDA uses, through Triton's interpreter: asynchronous, chunked, preempted, drafting."""
    command = [sys.executable, str(HERE / "omni_interpreted.py"), str(tmp_path)]
    found = json.loads(output_of(command, **KILLED_SOON).splitlines()[-1])
    for ranks in ("rows", "ranks"):
        error, preemptions = found[ranks]
        assert error < 1e-4 and preemptions > 0, ranks
    error, drafted, accepted = found["drafts"]
    assert error < 1e-4 and 0 < accepted < drafted
    assert found["nans"] and set(found["nans"]) == {3}
    assert found["tensors"] < 1e-5
