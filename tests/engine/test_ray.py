"""Two nodes of a Ray cluster give the tokens of one process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_on_cpu
from engines import CHECKPOINTS
from jobs import MIXED
from processes import HERE, SETTINGS, START_SECONDS, end, environment, spawn

pytestmark = pytest.mark.slow
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs ray")

NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a cluster of two nodes, whose workers find our platform."""
    ray_on_cpu.install(tmp_path)
    path = [str(tmp_path), str(HERE), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    head = NODE | {"include_dashboard": False}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(**NODE)
    try:
        yield nodes.address
    finally:
        nodes.shutdown()


def test_two_nodes_of_ray(cluster: str, tmp_path: Path) -> None:
    engine = SETTINGS | {
        "model": str(CHECKPOINTS / "tiny-llada"),
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "additional_config": {"dllm": {"strategy": "d2f"}},
    }
    requests = []
    for one in MIXED:
        extra = {f"dllm_{name}": value for name, value in one.numbers}
        extra["dllm_block_length"] = one.block_length
        given = {"max_tokens": one.max_tokens, "extra_args": extra}
        requests.append({"prompt": list(one.prompt), "params": given})
    wish, answer = {"engine": engine, "requests": requests}, tmp_path / "answer"
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = spawn(
            [
                *(sys.executable, str(HERE / "offline_script.py")),
                *(json.dumps([wish]), str(answer)),
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(RAY_ADDRESS=cluster),
        )
    try:
        process.wait(timeout=START_SECONDS)
    finally:
        end(process)
    output = log.read_text()
    assert process.returncode == 0, output[-6000:]
    [tokens] = json.loads(answer.read_text())
    assert tokens == [one.expected("llada")[0] for one in MIXED]
    assert "RayWorkerProc" in output
