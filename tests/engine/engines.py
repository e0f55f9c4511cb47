"""Real engines for the tests: one alive at a time, in this process."""

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import heap

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
FAMILIES = ("llada", "dream")
MASK_IDS = {"llada": 300, "llada-moe": 260, "dream": 279, "rnd1": 282}
STARTS: list[float] = []  # seconds of each start in this process, for `sums.py`
CANVAS, CONTEXT = 48, 160  # of full attention
NEVER = 319  # a token that the tiny checkpoints never predict


def named_engines() -> dict[str, dict[str, Any]]:
    """Settings of the engines that tests of several files share, by name."""
    named: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        named[f"{family}-d2f-sync"] = {"family": family}
        named[f"{family}-d2f-async"] = {"family": family, "async_scheduling": True}
        for strategy in ("semi_autoregressive", "prefix_cache", "dual_cache"):
            dllm = {"strategy": strategy, "canvas_length": CANVAS}
            name, settings = f"{family}-{strategy}", {"max_model_len": CONTEXT}
            named[name] = {"family": family, "dllm": dllm} | settings
    return named


class EngineRoom:
    """Starts an engine on demand and ends the one before it; equal wishes share an engine."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.wish: Any = None

    def start(
        self,
        family: str = "llada",
        dllm: dict[str, Any] | None = None,
        async_scheduling: bool = False,
        **options: Any,
    ) -> Any:
        """An ``LLM`` on a tiny checkpoint, or on the folder given as `model`."""
        settings: dict[str, Any] = {
            "model": str(CHECKPOINTS / f"tiny-{family}"),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 16 << 20,
            "disable_log_stats": False,
            "additional_config": {
                "dllm": {"strategy": "d2f"} if dllm is None else dllm
            },
        } | options
        wish = (settings, async_scheduling)
        # An engine that a failed test left in the middle of its work is not used again.
        usable = (
            self.llm is not None and not self.llm.llm_engine.has_unfinished_requests()
        )
        if usable and wish == self.wish:
            return self.llm
        self.close()
        from vllm import LLM

        # Now and then, for a test may have held what an engine left behind.
        (heap.freeze if len(STARTS) % 25 else heap.collect_all)()
        began = time.monotonic()
        with _async_on_cpu() if async_scheduling else contextlib.nullcontext():
            # A copy, for our hooks note things in `additional_config`.
            self.llm = LLM(**copy.deepcopy(settings))
        STARTS.append(time.monotonic() - began)
        assert (
            self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            is async_scheduling
        )
        self.wish = wish
        return self.llm

    def close(self) -> None:
        """End the engine that is alive."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = self.wish = None
            gc.collect()


@contextlib.contextmanager
def _async_on_cpu() -> Iterator[None]:
    """vLLM switches asynchronous scheduling off on CPUs; GPUs run with it, so test it here."""
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.platforms import current_platform

    platform = type(current_platform)
    update = platform.__dict__["check_and_update_config"]

    def keep_async(cls: Any, config: VllmConfig) -> None:
        update.__get__(None, cls)(config)
        assert isinstance(config.scheduler_config, SchedulerConfig)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(keep_async)
    try:
        yield
    finally:
        platform.check_and_update_config = update


def scheduler(llm: Any) -> Any:
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextlib.contextmanager
def at_most(llm: Any, in_flight: int) -> Iterator[None]:
    """Admit so many requests at a time: what `max_num_seqs` does, without an engine of its own."""
    ours = scheduler(llm)
    before, ours.max_num_active_reqs = ours.max_num_active_reqs, in_flight
    try:
        yield
    finally:
        ours.max_num_active_reqs = before


def canvas_states(llm: Any) -> Any:
    """What the worker of an in-process engine keeps of its requests."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.model_state.states


def free_pages(llm: Any) -> int:
    """Pages of the KV cache that no request holds."""
    return int(scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def num_preemptions(llm: Any) -> int:
    """Preemptions since the engine started, as vLLM's own metric counts them."""
    counters = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert counters, "vLLM exports the counter under this name"
    return sum(int(counter.value) for counter in counters)


def params(max_tokens: int, **options: Any) -> Any:
    """Greedy SamplingParams; keys that start with ``dllm_`` become extra_args."""
    from vllm import SamplingParams

    ours = {key: options.pop(key) for key in list(options) if key.startswith("dllm_")}
    settings = {"temperature": 0.0, "ignore_eos": True} | options
    return SamplingParams(max_tokens=max_tokens, extra_args=ours or None, **settings)


def generate(llm: Any, prompts: Sequence[list[int]], wishes: Any) -> list[Any]:
    """Finished outputs, in the order of the prompts."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, wishes, use_tqdm=False)


def streamed(llm: Any, prompt: list[int], wish: Any) -> str:
    """Text of a request, of which every output must continue the one before."""
    engine, text = llm.llm_engine, ""
    engine.add_request("streamed", {"prompt_token_ids": prompt}, wish)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.outputs[0].text.startswith(text)
            text = output.outputs[0].text
    return text


def one_of_each(cases: Sequence[Any], settings_of: Callable[[Any], Any]) -> list[Any]:
    """Return a recorded case of each setting, with a shorter and a longer prompt by turns."""
    alike: dict[str, list[Any]] = {}
    for case in cases:
        alike.setdefault(str(settings_of(case)), []).append(case)
    return [group[i % len(group)] for i, group in enumerate(alike.values())]


def token_ids(output: Any) -> list[int]:
    """Tokens of the first completion."""
    return list(output.outputs[0].token_ids)


def forwards(output: Any) -> int:
    """Denoising forwards: the histogram has one entry for each step of a request."""
    return sum(output.outputs[0].spec_decode_metrics.histogram)


def results(outputs: Sequence[Any]) -> list[tuple[list[int], int]]:
    """Tokens and denoising forwards of each request."""
    return [(token_ids(output), forwards(output)) for output in outputs]


def check_prompt_logprobs(
    plain: Any, prompt: list[int], columns: int, output: Any
) -> None:
    """Those of a causal forward of the plain model: the best ids, and the prompt's own."""
    scores = plain.rows(prompt, list(range(len(prompt)))).log_softmax(-1)
    found = output.prompt_logprobs
    assert len(found) == len(prompt) and found[0] is None
    for row, token, entry in zip(scores[:-1], prompt[1:], found[1:], strict=True):
        assert {token, *row.topk(columns).indices.tolist()} == set(entry)
        assert entry[token].rank == int((row >= row[token]).sum())
        for i, one in entry.items():
            assert abs(one.logprob - float(row[i])) < 1e-3


def step_through(
    llm: Any, arrivals: dict[int, list[tuple[str, list[int], Any]]]
) -> dict[str, Any]:
    """Drive the engine by hand; ``arrivals[k]`` join before step k. Returns final outputs."""
    engine, step, done = llm.llm_engine, 0, {}
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for name, prompt, wish in arrivals.get(step, ()):
            engine.add_request(name, {"prompt_token_ids": prompt}, wish)
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        step += 1
    return done


LETTERS = list(range(64, 90))  # "a" to "z" in both tiny vocabularies


def abort_often(llm: Any, jobs: Sequence[tuple[list[int], Any]]) -> None:
    """Abort (prompt, wish) pairs after 0, 1, 2 and 5 steps; all pages come back every time."""
    engine, pages = llm.llm_engine, free_pages(llm)
    names = [str(i) for i in range(len(jobs))]
    for steps in (0, 1, 2, 5):
        for name, (prompt, wish) in zip(names, jobs, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, wish)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        for _ in range(3):
            engine.step()
        assert not engine.has_unfinished_requests()
        assert free_pages(llm) == pages, steps


def letters(length: int, seed: int = 0) -> list[int]:
    """A prompt of letters: vLLM decodes an answer behind broken UTF-8 together with it."""
    return [LETTERS[(5 * i * i + seed * i + seed) % 26] for i in range(length)]


def a_prompt(length: int, seed: int = 0) -> list[int]:
    """Byte tokens without pattern, the same in every run."""
    return [
        (7 * i * i + 31 * i + 13 * seed + i * seed) % 251 for i in range(1, length + 1)
    ]
