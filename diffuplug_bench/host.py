"""Run ``diffuplug bench host``: measure what a denoising step costs outside the model forward.

The engine runs in this process. A step is one ``LLMEngine.step()``: schedule, prepare, forward,
sample, commit, detokenise. Hooks on the model and on its logits processor time the forward; the
rest is the host.
"""

import json
import os
import shlex
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diffuplug_bench.report import table_of
from dllm_plugin.commands.installation import installation
from dllm_plugin.commands.offline import start_engine

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM

CANVAS_AT_MOST = 256
TEXT = "Tom has 3 boxes with 12 pencils each and gives 4 pencils to a friend. "


class ForwardClock:
    """Time the hooked modules and count the forwards of the model."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.forwards = 0
        self._entered = 0.0

    def attach(self, model: "nn.Module") -> None:
        """Add hooks to the model and its logits processors; the worker calls this."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        model.register_forward_hook(self._count)
        for module in model.modules():
            if module is model or isinstance(module, LogitsProcessor):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._entered = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._entered

    def _count(self, *_: Any) -> None:
        self.forwards += 1


def run(
    options: dict[str, Any],
    requests: Sequence[int],
    max_tokens: int,
    seed: int,
    command: Sequence[str],
) -> int:
    """Measure every number of concurrent requests, print a table and one JSON line."""
    # vLLM reads it when the engine is built. Hooks can time the forward only in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ValueError(
            f"bench host reads the host's clock around the forward, which on "
            f"{current_platform.device_name} runs asynchronously: use it on a CPU"
        )
    most = max(requests)
    # Enough tokens per step for all canvases, otherwise some requests would wait.
    tokens = {"max_num_batched_tokens": most * CANVAS_AT_MOST}
    llm = start_engine(options | {"seed": seed, "max_num_seqs": most} | tokens)
    clock = ForwardClock()
    llm.apply_model(clock.attach)
    _measure(llm, clock, 1, max_tokens)  # warm-up
    rows = [_measure(llm, clock, count, max_tokens) for count in requests]
    machine = installation()
    print(
        f"{machine['hardware']}; vLLM {machine['vllm']}, torch {machine['torch']}, seed {seed}"
    )
    print(f"median of the steps\n{table_of('host', rows)}")
    record = {
        "benchmark": "host",
        "command": shlex.join(["diffuplug", *command]),
        **machine,
        "model": os.path.basename(options["model"]),
        "settings": options["additional_config"]["dllm"],
        "seed": seed,
        "max_tokens": max_tokens,
        "rows": rows,
    }
    print(json.dumps(record))
    return 0


def _measure(
    llm: "LLM", clock: ForwardClock, requests: int, max_tokens: int
) -> dict[str, Any]:
    """Return median times of the steps in which all `requests` were denoised."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    llm.enqueue([f"{TEXT}{i}" for i in range(requests)], sampling, use_tqdm=False)
    engine = llm.llm_engine
    steps = []
    while engine.has_unfinished_requests():
        alive = engine.get_num_unfinished_requests()
        seconds, forwards = clock.seconds, clock.forwards
        start = time.perf_counter()
        engine.step()
        total = time.perf_counter() - start
        # Steps without a forward and the tail, in which requests end one by one, do not count.
        if alive == requests and clock.forwards > forwards:
            steps.append((total, clock.seconds - seconds))
    steps = steps[1:]  # the prompt
    if not steps:
        raise ValueError(
            f"no denoising step to measure: raise --max-tokens above {max_tokens}"
        )
    host = [total - forward for total, forward in steps]
    return {
        "requests": requests,
        "steps": len(steps),
        "host_ms": 1e3 * statistics.median(host),
        "forward_ms": 1e3 * statistics.median(forward for _, forward in steps),
        "step_ms": 1e3 * statistics.median(total for total, _ in steps),
    }
