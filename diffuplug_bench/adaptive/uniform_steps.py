"""Time steps of any uniform width and context inside a worker, for ``diffuplug bench map``.

A step is the forward and the LM head over all its rows, without sampling. On a GPU each step is
captured, as in serving, and its graph is dropped once it is timed.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

REPLAYS = 3


@torch.inference_mode()
def time_steps(
    runner: Any, requests: Sequence[int], widths: Sequence[int], contexts: Sequence[int]
) -> list[tuple[int, int, int, float]]:
    """Return (requests, width, context of each, ms) of every combination that fits a step."""
    on_gpu = runner.device.type == "cuda"
    mode = CUDAGraphMode.FULL if on_gpu else CUDAGraphMode.NONE
    found = []
    for num_reqs in requests:
        for width in widths:
            if num_reqs * width > runner.max_num_tokens:
                continue
            run = _step(runner, num_reqs, width, mode)
            for context in contexts:
                runner.prepare_step(num_reqs, width, context, mode)
                ms = _gpu_ms(run) if on_gpu else _cpu_ms(run)
                found.append((num_reqs, width, context, ms))
            del run
            if on_gpu:
                torch.cuda.empty_cache()
    runner.block_tables.get_dummy_block_tables(runner.max_num_reqs)
    return found


def _step(
    runner: Any, num_reqs: int, width: int, mode: CUDAGraphMode
) -> Callable[[], Any]:
    """Return what runs a step whose buffers are filled: a graph's replay, or the step itself."""
    batch, metadata, slots = runner.prepare_step(num_reqs, width, 0, mode)
    by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
    inputs = {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "intermediate_tensors": None,
        **runner.model_state.prepare_dummy_inputs(num_reqs, batch.num_tokens),
    }

    def step() -> None:
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=batch.num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=by_layer,
            is_padding=batch.is_padding,
        ):
            runner.model.compute_logits(runner.model(**inputs))

    if runner.device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with graph_capture(device=runner.device) as captured:
        step()
        with torch.cuda.graph(graph, stream=captured.stream):
            step()
    return graph.replay


def _gpu_ms(run: Callable[[], Any]) -> float:
    """Return the median time of a step on a GPU, after one run that does not count."""
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


def _cpu_ms(run: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - begin))
    return float(np.median(taken))
