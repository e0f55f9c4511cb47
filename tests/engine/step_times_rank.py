"""Be the one rank of an engine of data parallelism that has timed its steps: RANK MEETING FILE."""

import sys

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.parallel_state import init_distributed_environment

from dllm_plugin.config.step_times import KEY, StepTimes
from dllm_plugin.engine.worker.graph_times import keep


def measured(rank: int) -> StepTimes:
    return StepTimes((2, 64), (4.0 + rank, 5.0 + rank), 1e-5)


if __name__ == "__main__":
    number, meeting, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    init_distributed_environment(2, number, meeting, backend="gloo")
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=number)
    keep(
        VllmConfig(parallel_config=parallel, additional_config={KEY: path}),
        measured(number),
    )
