"""Time the sampler on a GPU against the bytes that it has to read: `python sampler.py`.

First table: the kernel that reads the logits (`kernels/confidence`) in each mode, its plain-torch
reference, and the floor: the bytes of the logits over the copy bandwidth measured in the same run.
Logits come from buffers larger than the cache, and a CUDA graph takes the host out of the figures.
Second table: whole sampler calls on real states, without a model: time of all kernels, host time
until they are enqueued, and number of kernels. Needs CUDA and vLLM. Prints tables and one JSON
line.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from torch.profiler import ProfilerActivity, profile
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from dllm_plugin.config.memory import StepSize
from dllm_plugin.config.options import Options
from dllm_plugin.config.resolution import resolve
from dllm_plugin.engine.sampler import DiffusionSampler
from dllm_plugin.kernels.confidence import kernel as confidence
from dllm_plugin.kernels.confidence import reference
from dllm_plugin.kernels.confidence.reference import RowSampling
from dllm_plugin.state.canvas_states import CanvasStates

DEVICE = torch.device("cuda")
SEED = 0
CACHE_BYTES = 256 << 20  # several times the second-level cache
FAMILIES = {
    "LLaDA": ("LLaDAModelLM", 126464, 126336),
    "Dream": ("DreamModel", 152064, 151666),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "entropy+margin": {"temperature": 0.0, "want_ranking": True},
    "sampled": {"temperature": 0.7},
}


def graph_ms(run: Callable[[int], Any], inner: int, repeats: int = 7) -> float:
    """Return the median milliseconds of one call; a CUDA graph replays `inner` calls."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            run(i)
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / inner)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second of a kernel that copies, read and write counted.

    In a graph, a plain copy would go through the copy engine, which is slower.
    """
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    ms = graph_ms(lambda _: torch.neg(source, out=target), 4)
    return 2 * source.numel() * 2 / ms * 1e3


def measure_rows(
    rows: int, vocab: int, programs: int, bandwidth: float
) -> list[dict[str, Any]]:
    """Time every mode at one size."""
    size = rows * vocab * 2
    buffers = max(1, -(-CACHE_BYTES // size))
    logits = torch.randn(buffers, rows, vocab, dtype=torch.bfloat16, device=DEVICE) * 3
    slots = torch.arange(rows, device=DEVICE) % 64
    found = []
    for mode, given in MODES.items():
        options = dict(given)
        temperature = torch.full((64,), options.pop("temperature"), device=DEVICE)
        table = torch.arange(64, device=DEVICE)
        sampling = None
        if temperature.any():
            sampling = RowSampling(temperature, table, table, table, slots, 0)
        inner = max(buffers, 4)

        def kernel(i: int, options: dict = options, sampling: Any = sampling) -> Any:
            x = logits[i % buffers]
            row = reference.Reading(x, slots, 5, sampling, **options)
            return confidence.propose_rows(row, programs)

        def plain(i: int, options: dict = options, sampling: Any = sampling) -> None:
            for low in range(0, rows, 256):
                some = slice(low, low + 256)
                few = sampling and sampling._replace(offset_T=slots[some])
                x = logits[i % buffers][some]
                row = reference.Reading(x, slots[some], 5, few, **options)
                reference.propose_rows(row)

        few = sampling and sampling._replace(offset_T=slots[:256])
        first = reference.Reading(logits[0][:256], slots[:256], 5, few)
        got, want = kernel(0), reference.propose_rows(first)
        equal = bool(torch.equal(got.token_T[:256], want.token_T))
        kernel_ms = graph_ms(kernel, inner)
        reference_ms = graph_ms(plain, 1, repeats=3)
        floor_ms = size / bandwidth * 1e3
        found.append(
            {
                "rows": rows,
                "vocab": vocab,
                "mode": mode,
                "kernel_ms": kernel_ms,
                "floor_ms": floor_ms,
                "reference_ms": reference_ms,
                "same_tokens": equal,
            }
        )
    return found


class Bench:
    """Hold a sampler on real states with endless requests; `prepare` makes a step's batch."""

    def __init__(
        self,
        family: str,
        strategy: str,
        most_requests: int,
        canvas: int,
        compiles: bool,
    ) -> None:
        architecture, self.vocab, mask = FAMILIES[family]
        block = min(32, canvas)
        dllm = {"strategy": strategy, "block_length": block, "canvas_length": canvas}
        model_len, most_rows = 8192, most_requests * canvas
        config = resolve(Options.from_user(dllm), architecture, model_len, mask)
        model_config: Any = SimpleNamespace(
            max_model_len=model_len,
            max_logprobs=20,
            dtype=torch.bfloat16,
            get_vocab_size=lambda: self.vocab,
            hf_config=SimpleNamespace(eos_token_id=2),
        )
        req_states = RequestState(
            most_requests, model_len, most_rows, canvas, self.vocab, DEVICE
        )
        self.states = CanvasStates(config, model_config, req_states.draft_tokens)
        self.sampling = SamplingStates(most_requests, self.vocab)
        owner = SimpleNamespace(req_states=req_states, sampling_states=self.sampling)
        rows, vocab = (most_rows, config.rows_at_once), self.vocab
        size = StepSize(*rows, most_requests, canvas, vocab, vocab, 2, 20)
        self.sampler = DiffusionSampler(owner, self.states, model_config, size)
        start = time.perf_counter()
        if compiles:
            torch._dynamo.reset()
            self.sampler.compile()
            torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - start
        self.canvas = canvas
        for slot in range(most_requests):
            self._add(slot)
        self.states.apply_staged_writes()

    def prepare(self, requests: int, temperature: float) -> None:
        """Make the batch of the first `requests` requests, and logits that change one block only.

        At threshold 0.9 only the best position is unmasked: requests go on for thousands of steps.
        """
        self.sampling.temperature.np.fill(temperature)
        self.sampler.apply_staged_writes()
        self.batch = self._batch(requests)
        self.logits = torch.randn(
            requests * self.canvas, self.vocab, dtype=torch.bfloat16, device=DEVICE
        )

    def _add(self, slot: int) -> None:
        params = SamplingParams(
            max_tokens=4096, ignore_eos=True, seed=SEED, extra_args={}
        )
        params.update_from_generation_config({}, 2)
        prompt = list(range(100, 356))
        data = NewRequestData(
            f"r{slot}",
            prompt,
            [],
            params,
            None,
            ((),),
            0,
            None,
            prefill_token_ids=prompt,
        )
        self.states.add_request(slot, data)
        self.sampler.add_request(slot, params)

    def _batch(self, requests: int) -> InputBatch:
        canvas = self.canvas
        slots, total = np.arange(requests), requests * canvas
        bounds = np.arange(requests + 1, dtype=np.int32) * canvas
        lengths = np.full(requests, canvas, dtype=np.int32)

        def device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(DEVICE)

        return InputBatch(
            req_ids=[f"r{slot}" for slot in slots],
            num_reqs=requests,
            num_reqs_after_padding=requests,
            idx_mapping=device(slots),
            idx_mapping_np=slots,
            expanded_idx_mapping=device(np.repeat(slots, canvas)),
            expanded_local_pos=device(
                np.tile(np.arange(canvas, dtype=np.int32), requests)
            ),
            num_scheduled_tokens=lengths,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_draft_tokens=total,
            num_draft_tokens_per_req=lengths,
            query_start_loc=device(bounds),
            query_start_loc_np=bounds,
            seq_lens=device(lengths + 256),
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths + 256),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=lengths * 0 + 256,
            prefill_len_np=lengths * 0 + 256,
            num_computed_prefill_tokens_np=lengths * 0 + 256,
            is_prefilling_np=np.zeros(requests, dtype=bool),
            has_prefill=False,
            decode_graph_eligible=True,
            input_ids=torch.zeros(total, dtype=torch.int32, device=DEVICE),
            positions=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            is_padding=torch.zeros(total, dtype=torch.bool, device=DEVICE),
            logits_indices=torch.arange(total, device=DEVICE),
            cu_num_logits=device(bounds),
            cu_num_logits_np=bounds,
            has_structured_output_reqs=False,
            prompt_lens=None,
        )

    def step(self) -> None:
        """Run what the runner asks of us in one step, without attention and forward."""
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.sampler.request_logits(self.batch)
        self.sampler(self.logits, self.batch)

    def measure(self, steps: int = 10) -> dict[str, Any]:
        """Return medians over single steps; the profiler runs steps of its own after those."""
        for _ in range(5):
            self.step()
        torch.cuda.synchronize()
        host = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            host.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                self.step()
            torch.cuda.synchronize()
        kernels = [event for event in trace.events() if event.device_time_total > 0]
        return {
            "host_ms": 1e3 * statistics.median(host),
            "gpu_ms": sum(event.device_time_total for event in kernels) / steps / 1e3,
            "kernels": len(kernels) / steps,
            "compile_seconds": self.compile_seconds,
        }


def main() -> None:
    """Print both tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[32, 128, 512, 2048, 8192]
    )
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--canvas", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--strategies", nargs="*", default=["d2f", "block_diffusion"])
    parser.add_argument(
        "--programs", type=int, nargs="*", default=[confidence.PROGRAMS]
    )
    parser.add_argument("--tile", type=int, default=confidence.TILE)
    parser.add_argument("--warps", type=int, default=confidence.NUM_WARPS)
    parser.add_argument(
        "--uncompiled", action="store_true", help="the step as it is without"
    )
    options = parser.parse_args()
    confidence.TILE, confidence.NUM_WARPS = options.tile, options.warps
    torch.manual_seed(SEED)
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vLLM {vllm.__version__}, "
        f"copy {bandwidth / 1e12:.2f} TB/s, tile {options.tile}, {options.warps} warps, seed {SEED}"
    )
    print(
        f"{'rows':>6} {'vocab':>7} {'mode':>15} {'prog':>5} {'kernel':>8} {'floor':>8} {'plain':>8}"
    )
    rows = []
    for programs in options.programs:
        for _, vocab, _ in FAMILIES.values():
            for count in options.rows:
                for row in measure_rows(count, vocab, programs, bandwidth):
                    rows.append(row | {"programs": programs})
                    print(
                        f"{count:>6} {vocab:>7} {row['mode']:>15} {programs:>5} "
                        f"{row['kernel_ms']:>8.4f} {row['floor_ms']:>8.4f} "
                        f"{row['reference_ms']:>8.3f}"
                        f"{'' if row['same_tokens'] else '  TOKENS DIFFER'}"
                    )
                torch.cuda.empty_cache()
    print(f"{'family':>6} {'strategy':>16} {'reqs':>5} {'canvas':>6} {'T':>4} ", end="")
    print(f"{'GPU ms':>8} {'host ms':>8} {'kernels':>8} {'compile s':>10}")
    calls = []
    kinds = itertools.product(options.families, options.strategies, options.canvas)
    for family, strategy, canvas in kinds:
        bench = Bench(
            family, strategy, max(options.requests), canvas, not options.uncompiled
        )
        for requests, temperature in itertools.product(options.requests, (0.0, 0.7)):
            bench.prepare(requests, temperature)
            row = bench.measure()
            torch.cuda.empty_cache()
            names = ("family", "strategy", "requests", "canvas", "temperature")
            values = (family, strategy, requests, canvas, temperature)
            calls.append(dict(zip(names, values, strict=True)) | row)
            print(
                f"{family:>6} {strategy:>16} {requests:>5} {canvas:>6} {temperature:>4} "
                f"{row['gpu_ms']:>8.3f} {row['host_ms']:>8.3f} {row['kernels']:>8.1f} "
                f"{row['compile_seconds']:>10.1f}"
            )
        del bench
        torch.cuda.empty_cache()
    record = {
        "benchmark": "sampler",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "seed": SEED,
        "bandwidth": bandwidth,
        "tile": options.tile,
        "warps": options.warps,
        "rows": rows,
        "calls": calls,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
