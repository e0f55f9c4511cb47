"""Time steps of any uniform width and context, for ``diffuplug bench map``.

A step is the forward and the LM head over all its rows; proposing and deciding are left out. On a
GPU each is captured, as steps are served, and its graph is dropped once it is timed.
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
from vllm.v1.worker.gpu_worker import Worker

from dllm_plugin.engine.worker.graph_times import REPLAYS, median_ms, prepare


class TimingWorker(Worker):
    """Run vLLM's worker with a way to time steps while no request runs."""

    @torch.inference_mode()
    def time_steps(
        self, requests: Sequence[int], widths: Sequence[int], contexts: Sequence[int]
    ) -> list[tuple[int, int, int, float]]:
        """Return (requests, width, context of each, ms) of every combination that fits a step."""
        runner: Any = self.model_runner
        found, most = [], runner.max_num_tokens
        for num_reqs in requests:
            for width in (w for w in widths if num_reqs * w <= most):
                run = _step(runner, num_reqs, width)
                for context in contexts:
                    prepare(runner, num_reqs, width, context, _mode(runner))
                    found.append((num_reqs, width, context, _ms(runner, run)))
                del run
                if runner.device.type == "cuda":
                    torch.cuda.empty_cache()
        runner.block_tables.get_dummy_block_tables(runner.max_num_reqs)
        return found


def _mode(runner: Any) -> CUDAGraphMode:
    return CUDAGraphMode.FULL if runner.device.type == "cuda" else CUDAGraphMode.NONE


def _step(runner: Any, num_reqs: int, width: int) -> Callable[[], Any]:
    """Return what runs a step whose buffers are filled: a graph's replay, or the step itself."""
    batch, metadata, slots = prepare(runner, num_reqs, width, 0, _mode(runner))
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


def _ms(runner: Any, run: Callable[[], Any]) -> float:
    if runner.device.type == "cuda":
        return median_ms(run)
    taken = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        run()
        taken.append(1000 * (time.perf_counter() - begin))
    return float(np.median(taken))
