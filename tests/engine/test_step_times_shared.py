"""Engines of data parallelism: every one finds the first rank's times of steps."""

import multiprocessing
from pathlib import Path

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.parallel_state import init_distributed_environment
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

from dllm_plugin.config.step_times import KEY, StepTimes, load, save
from dllm_plugin.engine.graph_times import keep

SECONDS = 120
EARLIER = StepTimes((1,), (9.0,), 0.0)


def measured(rank: int) -> StepTimes:
    return StepTimes((2, 64), (4.0 + rank, 5.0 + rank), 1e-5)


def keep_as(rank: int, meeting: str, path: str) -> None:
    """Be the one rank of an engine."""
    init_distributed_environment(2, rank, meeting, backend="gloo")
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank)
    keep(VllmConfig(parallel_config=parallel, additional_config={KEY: path}), measured(rank))


def test_all_engines_have_the_same_times(tmp_path: Path) -> None:
    path, meeting = (
        tmp_path / "times.json",
        get_distributed_init_method("127.0.0.1", get_open_port()),
    )
    other = tmp_path / "times-1.json"
    save(other, EARLIER)
    context = multiprocessing.get_context("fork")  # an import of vLLM takes longer than the test
    arguments = [(rank, meeting, str(path)) for rank in range(2)]
    ranks = [context.Process(target=keep_as, args=given) for given in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        assert process.exitcode == 0
    assert load(path) == load(other) == measured(0)
