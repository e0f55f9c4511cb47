"""Measure the times of captured steps: replay full CUDA graphs at empty and at long contexts.

All ranks replay them together, as in steps, before the first request.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, set_dummy_context
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.step_times import StepTimes, own_path, save

logger = init_logger("vllm.dllm_plugin")

REPLAYS = 3
# At most so much context of so many requests, to measure its cost.
LONG, REQUESTS = 4096, 64


def measure(runner: GPUModelRunner) -> None:
    """Measure the captured steps and store their times, if the configuration names a file."""
    if own_path(runner.vllm_config) is None:
        return
    manager = runner.cudagraph_manager
    assert manager is not None
    # With adapters every graph may have active adapters.
    least = min(desc.num_active_loras for desc in manager.graphs)
    descs = [desc for desc in manager.graphs if desc.num_active_loras == least]
    empty = time_graphs(runner, descs, 0)
    most = max(n for desc in descs if (n := desc.num_reqs or 0) <= REQUESTS)
    many = [desc for desc in descs if desc.num_reqs == most]
    pages = runner.kv_cache_config.num_blocks * runner.block_tables.block_sizes[0]
    context = min(LONG, runner.max_model_len // 2, pages // most)
    long = time_graphs(runner, many, context)
    reads = get_decode_config(runner.vllm_config).context_reads
    times = step_times(empty, long, context, reads)
    logger.info(
        "Full CUDA graphs take %.2f ms for %d positions and %.2f ms for %d, and 1,000 tokens of "
        "context %.4f ms.",
        times.ms[0],
        times.positions[0],
        times.ms[-1],
        times.positions[-1],
        1000 * times.per_key,
    )
    keep(runner.vllm_config, times)


def keep(vllm_config: VllmConfig, times: StepTimes) -> None:
    """Store the first rank's times for every engine: all ranks call this together.

    The experts of a mixture are spread over engines of data parallelism, whose steps take equally
    long, so all of them begin with the same times.
    """
    world = get_world_group()
    path = own_path(vllm_config)
    assert path is not None
    shared = world.broadcast_object(times)
    if world.rank_in_group % vllm_config.parallel_config.world_size == 0:
        save(path, StepTimes(*shared))


Times = dict[BatchExecutionDescriptor, float]


def step_times(empty: Times, long: Times, context: int, reads: float) -> StepTimes:
    """Return the table of times at empty contexts, and what a key adds to those at long ones."""
    by_positions: dict[int, list[float]] = {}
    for desc, ms in empty.items():
        by_positions.setdefault(desc.num_tokens, []).append(ms)
    positions = sorted(by_positions)
    medians = [float(np.median(by_positions[n])) for n in positions]
    added = []
    for desc, ms in long.items():
        # Run and window are sequences of their own, and each reads its context.
        times_read = reads if (desc.uniform_token_count or 1) > 1 else 1.0
        keys = (desc.num_reqs or 1) * context * times_read
        added.append((ms - empty[desc]) / max(keys, 1))
    monotone = np.maximum.accumulate(medians).tolist()
    return StepTimes(
        tuple(positions), tuple(monotone), max(float(np.median(added)), 0.0)
    )


@torch.inference_mode()
def time_graphs(
    runner: GPUModelRunner, descs: Iterable[BatchExecutionDescriptor], context: int
) -> Times:
    """Return the median ms of replays of each graph, with so much context for every request."""
    manager = runner.cudagraph_manager
    found = {}
    assert manager is not None
    for desc in descs:
        assert desc.num_reqs is not None and desc.uniform_token_count is not None
        uniform = (desc.num_reqs, desc.uniform_token_count)
        prepare(runner, *uniform, context, CUDAGraphMode.FULL)
        found[desc] = median_ms(partial(manager.run_fullgraph, desc))
    # No page of a context stays where padding is read from.
    runner.block_tables.get_dummy_block_tables(runner.max_num_reqs)
    return found


def prepare(
    runner: GPUModelRunner,
    num_reqs: int,
    width: int,
    context: int,
    mode: CUDAGraphMode,
) -> tuple[InputBatch, dict[str, Any], torch.Tensor]:
    """Fill the buffers of a step of one width: half of every canvas is decided.

    Returns the batch, its attention metadata and its slots.
    """
    tables = runner.block_tables
    buffers = runner.input_buffers
    num_tokens = num_reqs * width
    batch = InputBatch.make_dummy(num_reqs, num_tokens, buffers, is_padding=False)
    # Equal tokens would all be routed to the same experts.
    batch.input_ids.random_(0, runner.vocab_size)
    given = tables.get_dummy_block_tables(num_reqs)
    slots = tables.get_dummy_slot_mappings(num_tokens)
    pages = runner.kv_cache_config.num_blocks
    most = runner.max_model_len
    set_dummy_context(batch, tables, context, pages, most, given)
    state: Any = runner.model_state
    canvas_NC = state.states.canvas_NC
    canvas_NC.fill_(state.config.mask_token_id)
    canvas_NC[:, : width // 2] = 0
    groups = runner.attn_groups
    cache = runner.kv_cache_config
    return batch, state.prepare_attn(batch, mode, given, slots, groups, cache), slots


def median_ms(run: Callable[[], Any]) -> float:
    """Return the median time of what a GPU is given, after one run that does not count."""
    run()
    taken = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return float(np.median(taken))
