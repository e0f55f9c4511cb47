"""Hidden states beside generated tokens, against a plain transformers forward."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineRoom, num_preemptions, scheduler
from omni_models import Reference, autoregressive, largest_error, prompt, twenty

from dllm_plugin.omni import hidden_state_args, hidden_state_params, hidden_states_of

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

TOLERANCE = 1e-4
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 14,  # fewer than the requests need: some are preempted
    "additional_config": {},
}
PROMPTS = [prompt(n, i) for i, n in enumerate([5, 150, 17, 33, 70, 64, 1, 100])]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models; `repeating` writes text that an n-gram drafter can guess."""
    root = tmp_path_factory.mktemp("autoregressive")
    return {
        "llama": autoregressive(root / "llama", "Llama"),
        "qwen2": autoregressive(root / "qwen2", "Qwen2"),
        "repeating": autoregressive(root / "repeating", "Llama", scale=0.05),
        "nan": autoregressive(root / "nan", "Llama", nan_rows=3),
    }


def asked(max_tokens: int, **options: Any) -> Any:
    return hidden_state_params(
        **{
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "max_tokens": max_tokens,
        }
        | options
    )


def plain(max_tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    settings = {"temperature": 0, "ignore_eos": True, "detokenize": False} | options
    return SamplingParams(max_tokens=max_tokens, **settings)


def generate(llm: Any, prompts: list[list[int]], wishes: Any) -> list[Any]:
    return llm.generate(
        [{"prompt_token_ids": p} for p in prompts], wishes, use_tqdm=False
    )


@pytest.fixture(
    scope="module",
    params=[("llama", False), ("llama", True), ("qwen2", False)],
    ids=["llama", "llama-async", "qwen2"],
)
def started(
    request: pytest.FixtureRequest, room: EngineRoom, checkpoints: dict[str, Path]
) -> Iterator[tuple[Any, Path]]:
    """An engine, synchronous or not, and its checkpoint."""
    name, overlapped = request.param
    folder = checkpoints[name]
    options = ENGINE | hidden_state_args()
    yield room.start(model=str(folder), async_scheduling=overlapped, **options), folder


def test_twenty_mixed_requests(started: tuple[Any, Path]) -> None:
    """Chunked prompts, preemption; some did not ask, and get what they get without us."""
    llm, folder = started
    before, reference = num_preemptions(llm), Reference(folder)
    outputs = llm.generate(*twenty(), use_tqdm=False)
    assert num_preemptions(llm) > before
    assert largest_error(reference, outputs) < TOLERANCE
    # Greedy tokens are those of rows: the LM head on row p gives token p + 1.
    for output in outputs[:4]:
        rows, tokens = (
            torch.from_numpy(hidden_states_of(output).rows),
            output.outputs[0].token_ids,
        )
        head = reference.model.lm_head(rows[-len(tokens) :])
        assert head.argmax(-1).tolist() == list(tokens)


def test_details_of_a_request(started: tuple[Any, Path]) -> None:
    """Several completions, stop tokens, a cached prefix, an abort and a preemption by reset."""
    llm, folder = started
    reference = Reference(folder)
    (output,) = generate(llm, PROMPTS[:1], asked(8, n=3, temperature=1.0, seed=3))
    assert max(reference.error(output, i) for i in range(3)) < TOLERANCE
    stop = generate(llm, PROMPTS[2:3], plain(8))[0].outputs[0].token_ids[4]
    (output,) = generate(llm, PROMPTS[2:3], asked(8, stop_token_ids=[stop]))
    assert (
        output.outputs[0].finish_reason == "stop"
        and reference.error(output) < TOLERANCE
    )
    # The prompt is in the cache now; what is read from there has no rows, and is not invented.
    generate(llm, PROMPTS[1:2], plain(1))
    (cached,) = generate(llm, PROMPTS[1:2], asked(5, skip_reading_prefix_cache=False))
    assert hidden_states_of(cached).start == cached.num_cached_tokens > 0
    assert reference.error(cached) < TOLERANCE
    (again,) = generate(llm, PROMPTS[1:2], asked(5))
    assert hidden_states_of(again).start == 0 and reference.error(again) < TOLERANCE


def test_abort_and_reset(started: tuple[Any, Path]) -> None:
    """An abort in the middle, and all running requests preempted at once, tokens dropped."""
    llm, folder = started
    engine, reference, done = llm.llm_engine, Reference(folder), {}
    for i in range(4):
        engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, asked(20))
    for step in range(200):
        done |= {out.request_id: out for out in engine.step() if out.finished}
        if step == 6:
            engine.abort_request(["0"])
        if step in (3, 9, 10, 15):
            engine.reset_prefix_cache(reset_running_requests=True)
        if not engine.has_unfinished_requests():
            break
    assert sorted(done) == ["1", "2", "3"]
    assert max(map(reference.error, done.values())) < TOLERANCE


class StaticOutput:
    """A model whose output is one buffer, as that of full CUDA graphs is."""

    def __init__(self, model: Any) -> None:
        self.model, self.buffer = model, torch.empty(64, 64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> torch.Tensor:
        output = self.model(**inputs)
        self.buffer.fill_(float("nan"))[: len(output)] = output
        return self.buffer[: len(output)]


def test_rows_are_copied_at_once(
    started: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step overwrites the model's output before the rows of this one are delivered."""
    llm, folder = started
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    monkeypatch.setattr(runner, "model", StaticOutput(runner.model))
    outputs = generate(llm, PROMPTS[:8], asked(12))
    assert max(map(Reference(folder).error, outputs)) < TOLERANCE


def test_chosen_layers(room: EngineRoom, checkpoints: dict[str, Path]) -> None:
    llm = room.start(
        model=str(checkpoints["llama"]), **ENGINE | hidden_state_args([0, 2, 3])
    )
    reference = Reference(checkpoints["llama"])
    outputs = generate(llm, PROMPTS[:8], asked(20))
    assert (
        max(reference.error(output, layers=[0, 2, 3]) for output in outputs) < TOLERANCE
    )
    assert hidden_states_of(outputs[0]).rows.shape[1:] == (3, 64)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"return_hidden_states": "perhaps"},
            "return_hidden_states must be true or false",
        ),
        ({"hidden_state_layers": [1]}, "start it with hidden_state_args"),
    ],
)
def test_requests_refused(
    room: EngineRoom, checkpoints: dict[str, Path], given: dict[str, Any], sentence: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    llm = room.start(
        model=str(checkpoints["llama"]), **ENGINE | hidden_state_args([0, 2, 3])
    )
    with pytest.raises(VLLMValidationError, match=sentence):
        generate(llm, PROMPTS[:1], plain(3, extra_args=given))


def test_who_did_not_ask_pays_nothing(
    room: EngineRoom, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rows are copied, and no array leaves the scheduler."""
    from dllm_plugin.omni import ar_runner

    llm = room.start(
        model=str(checkpoints["llama"]), **ENGINE | hidden_state_args([0, 2, 3])
    )
    copied = []
    monkeypatch.setattr(ar_runner, "StepRows", lambda *args: copied.append(args))
    generate(llm, PROMPTS[:3], plain(3))
    assert copied == [] and not llm.llm_engine.model_config.logits_processors


def test_tokens_and_logprobs_are_the_stock_engines(
    room: EngineRoom, checkpoints: dict[str, Path]
) -> None:
    """Bit for bit, and so is the scheduling, with its preemptions."""
    found = []
    for args in (hidden_state_args([0, 2, 3]), {}):
        llm = room.start(model=str(checkpoints["llama"]), **ENGINE | args)
        llm.reset_prefix_cache()  # of tests before this one, on an engine that is alive
        before, extra = (
            num_preemptions(llm),
            {"return_hidden_states": True} if args else None,
        )
        wish = plain(12, logprobs=3, extra_args=extra)
        outputs = [output.outputs[0] for output in generate(llm, PROMPTS[:8], wish)]
        found.append([(list(o.token_ids), o.logprobs) for o in outputs])
        found[-1].append(num_preemptions(llm) - before)
        assert all((o.routed_experts is not None) == bool(args) for o in outputs)
    assert found[0] == found[1]


def test_nan_counts_are_kept(
    room: EngineRoom, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    room.close()
    llm = room.start(model=str(checkpoints["nan"]), **ENGINE | hidden_state_args())
    steps, update = [], scheduler(llm).update_from_output

    def watch(scheduled: Any, output: Any) -> Any:
        steps.append((output.num_nans_in_logits, output.pooler_output))
        return update(scheduled, output)

    monkeypatch.setattr(scheduler(llm), "update_from_output", watch)
    outputs = generate(llm, PROMPTS[:2], asked(3))
    assert all(hidden_states_of(output) is not None for output in outputs)
    counts = [
        nans for nans, rows in steps if rows and any(row is not None for row in rows)
    ]
    assert counts and all(set(nans.values()) == {3} for nans in counts)
    room.close()


def test_streams_with_drafts(checkpoints: dict[str, Path]) -> None:
    """AsyncLLM, with a slow reader: all rows arrive with the last output. Rejected drafts have no
    rows, nor have accepted ones behind a stop. (vLLM's n-gram drafter imports numba, after which no
    engine starts in the same process; this one has its own.)"""
    from vllm import AsyncEngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    folder = checkpoints["repeating"]
    drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
    drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    settings = ENGINE | {
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
    }
    settings |= {"kv_cache_memory_bytes": 16 << 20, "model": str(folder)}
    settings |= {"speculative_config": drafts} | hidden_state_args()
    text = ([11, 57, 93, 200, 31] * 12)[:57]
    reference = Reference(folder)

    async def one(engine: Any, name: str, wish: Any, tokens: list[int] = text) -> Any:
        written: list[int] = []
        inputs = {"prompt_token_ids": tokens}
        async for output in engine.generate(inputs, wish, request_id=name):
            await asyncio.sleep(0.02)  # outputs are merged meanwhile
            found = output.outputs[0]
            written = list(found.token_ids)
            assert (found.routed_experts is not None) == output.finished
        assert reference.error(output) < TOLERANCE, name
        return written

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        try:
            kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
            wishes = [
                (kind, t) for kind in kinds for t in (text, text[:23], prompt(30))
            ]
            streams = [
                one(engine, f"{kind}{i}", asked(40, output_kind=kind), tokens)
                for i, (kind, tokens) in enumerate(wishes)
            ]
            tokens, *_ = await asyncio.gather(*streams)
            with pytest.raises(
                VLLMValidationError, match="use CUMULATIVE or FINAL_ONLY"
            ):
                await one(
                    engine, "deltas", asked(4, output_kind=RequestOutputKind.DELTA)
                )
            stops = [asked(40, stop_token_ids=[tokens[k]]) for k in (5, 9, 14, 21, 30)]
            stopped = [one(engine, f"stop{i}", wish) for i, wish in enumerate(stops)]
            await asyncio.gather(*stopped, one(engine, "short", asked(7)))
        finally:
            engine.shutdown()

    asyncio.run(run())
    counts = {m.name: m for m in get_metrics_snapshot()}
    accepted = counts["vllm:spec_decode_num_accepted_tokens"].value
    assert 0 < accepted < counts["vllm:spec_decode_num_draft_tokens"].value
