"""Penalties: their formulas, what is counted, and what requests without them pay."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from mixed import BLOCK, D2F
from scripted import ARCHITECTURE, DEVICE, Loop, Run, sampling
from scripted_plain import ScriptedModel
from scripted_rows import MASK, VOCAB, Hashed
from test_step_features import Operations
from test_strategies_random import (
    PENALTIES,
    block_arguments,
    block_case,
    d2f_case,
    plain_text,
    run_batch,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_plugin.config import memory
from dllm_plugin.config.memory import penalty_bytes, reserved_bytes
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text
from dllm_plugin.sampling.features import penalties
from dllm_plugin.sampling.features.penalties import Penalties

TOO_CLOSE = 1e-4  # a decision that float32 may make either way
CASES = (
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "temperature": 0.7, "seed": 4},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.4},
)


def penalised(
    logits: np.ndarray, prompt: list[int], text: list[int], params: Any
) -> np.ndarray:
    """The formulas of vLLM, a row and a token at a time."""
    logits, counts = logits.copy(), Counter(t for t in text if t != MASK)
    for token in range(VOCAB):
        if token in prompt or counts[token]:
            scale = np.float32(params.repetition_penalty)
            value = logits[token]
            logits[token] = value / scale if value > 0 else value * scale
        logits[token] -= params.frequency_penalty * counts[token]
        logits[token] -= params.presence_penalty * (counts[token] > 0)
    return logits


def start(loop: Loop, wishes: Any = CASES, max_tokens: int = 14) -> list[Run]:
    """Requests with prompts of several lengths."""
    runs = []
    for i, options in enumerate(wishes):
        params = sampling(max_tokens, None, **options)
        prompt = [(5 * i + k) % 14 for k in range(i + 1)]
        runs.append(loop.start(prompt, Hashed(i), params, f"{i}"))
    return runs


@pytest.mark.parametrize("chunk", [4096, 5])
@pytest.mark.parametrize("dllm", [D2F, BLOCK], ids=["d2f", "block_diffusion"])
def test_the_formulas(
    dllm: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row that is read, against a loop; rows of others stay as they are."""
    monkeypatch.setattr(penalties, "COUNTED_AT_ONCE", chunk)
    loop, seen = Loop(dllm, rows_at_once=chunk), 0
    wishes = [*CASES, {}, {"logprobs": 1}, {"temperature": 0.8, "top_p": 0.9}]
    runs = {run.slot: run for run in start(loop, wishes)}
    feature = loop.sampler.features[Penalties]
    apply = feature.apply

    def checked(logits_TV: torch.Tensor, part: Any, slots_np: np.ndarray) -> None:
        nonlocal seen
        before = logits_TV.cpu().numpy().copy()
        apply(logits_TV, part, slots_np)
        after = logits_TV.cpu().numpy()
        for row, slot in enumerate(part.slot_T.tolist()):
            run = runs[slot]
            text = run.output + loop.states.canvas_NC[slot].tolist()
            wanted = penalised(before[row], run.prompt, text, run.params)
            is_other = run.params.repetition_penalty == 1.0
            is_other &= not run.params.presence_penalty
            if is_other and not run.params.frequency_penalty:
                assert (after[row] == before[row]).all()
            np.testing.assert_allclose(after[row], wanted, rtol=1e-5, atol=1e-6)
            seen += 1

    monkeypatch.setattr(feature, "apply", checked)
    loop.run()
    assert seen > 200


def with_penalties(rng: np.random.Generator, case: dict[str, Any]) -> dict[str, Any]:
    """A case that asks for some of the penalties."""
    chosen = rng.random(3) < 0.6
    numbers = (
        float(rng.choice([0.7, 1.1, 1.5, 2.0])),
        float(rng.choice([-1.0, 0.5, 2.0])),
        float(rng.choice([-0.5, 0.3, 1.0])),
    )
    asked = zip(PENALTIES, numbers, chosen, strict=True)
    return case | {name: number for name, number, is_in in asked if is_in}


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("strategy", ["d2f", "block_diffusion"])
def test_as_the_plain_loop(strategy: str, shift: bool) -> None:
    """Tokens and forwards, several open blocks and every policy, in one batch."""
    rng, num_cases = np.random.default_rng([5, shift]), 24
    dllm = {"strategy": strategy, "block_length": 4, "canvas_length": 16}
    loop = Loop(dllm, shift, slots=num_cases, max_model_len=40)
    cases, extras = [], []
    for seed in range(num_cases):
        if strategy == "d2f":
            case = d2f_case(rng, seed, shift, context=40)
            extra = {
                "dllm_block_add_threshold": case["add"],
                "dllm_decoded_token_threshold": case["activate"],
                "dllm_threshold": case["accept"],
            }
        else:
            case = block_case(rng, seed, shift)
            extra = block_arguments(case)
        cases.append(with_penalties(rng, case))
        extras.append(extra)
    bounds = {} if strategy != "d2f" else {"max_active_blocks": 4, "canvas_length": 16}
    compared = differs = 0
    for case, run in zip(cases, run_batch(loop, cases, extras), strict=True):
        text = plain_text(case, strategy, **bounds)
        if text.margin < TOO_CLOSE:
            continue
        assert (run.output, len(run.passes)) == text.result(), case
        without = {k: v for k, v in case.items() if k not in PENALTIES}
        differs += plain_text(without, strategy, **bounds).answer() != run.output
        compared += 1
    assert compared > num_cases * 0.8 and differs > num_cases / 3


def test_first_tokens_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast-dLLM v2 decides them from rows of their own, after prefills too."""
    monkeypatch.setitem(ARCHITECTURE, True, "Fast_dLLM_QwenForCausalLM")
    dllm = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}
    loop = Loop(dllm | {"threshold": 0.6}, True)
    prompts = [[3, 7, 9, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
    wishes = [{"repetition_penalty": 2.0, "presence_penalty": 1.5}, {}]
    runs = []
    for i, (prompt, options) in enumerate(zip(prompts, wishes, strict=True)):
        params = sampling(12, None, **options)
        runs.append(loop.start(prompt, Hashed(i), params, f"{i}"))
    loop.run()
    for i, (run, options) in enumerate(zip(runs, wishes, strict=True)):
        rules = Rules("sub_blocks", block_length=4, threshold=0.6, on_grid=True)
        rules = Rules(**{**vars(rules), **options})
        text = Text(ScriptedModel(Hashed(i), True), run.prompt, 12, rules)
        assert decode(text).tokens == run.output
        assert text.margin > TOO_CLOSE


@pytest.mark.parametrize("when", range(1, 7))
def test_preempted_and_resumed(when: int) -> None:
    """What was decided before counts once, committed or on the canvas."""
    outputs = []
    for interrupts in (False, True):
        loop = Loop(D2F)
        runs = start(loop)
        for _ in range(when):
            loop.step()
        left = [run for run in runs if not run.done]
        if interrupts:
            for run in left:
                loop.preempt(run)
            for run in reversed(left):
                loop.resume(run)
        loop.run()
        outputs.append([run.output for run in runs])
    assert outputs[0] == outputs[1]


def test_a_text_does_not_depend_on_its_batch() -> None:
    """Alone, among penalised requests, and beside requests without penalties."""
    loop = Loop(D2F)
    together = start(loop, [*CASES, {}, {"logprobs": 0}])
    loop.run()
    for i, options in enumerate(CASES):
        loop = Loop(D2F)
        wishes: list[dict[str, Any]] = [{}] * i + [options]
        lonely = start(loop, wishes)[i]
        loop.run()
        assert lonely.output == together[i].output


@pytest.mark.parametrize("number", [1e-300, 1e300])
def test_extreme_penalties_break_no_request(number: float) -> None:
    """vLLM takes any positive repetition penalty; logits stay finite."""
    loop = Loop(D2F)
    (run,) = start(loop, [{"repetition_penalty": number}])
    loop.run()
    assert not run.broken and len(run.output) == 14


def operations(loop: Loop, runs: list[Run]) -> list[int]:
    """Operations of each step of requests."""
    counts = []
    while not all(run.done for run in runs):
        with Operations() as counted:
            loop.step()
        counts.append(counted.counts.total())
    return counts


@pytest.mark.skipif(DEVICE.type != "cpu", reason="other devices launch other kernels")
def test_requests_without_penalties_pay_nothing() -> None:
    """No tables before the first request, and no operation more after the last."""
    plain: list[dict[str, Any]] = [{}, {}, {"temperature": 0.5, "seed": 2}]
    loop = Loop(D2F)
    feature = loop.sampler.features[Penalties]
    before = operations(loop, start(loop, plain))
    assert feature.prompt_NV is None and feature.count_NV is None
    start(loop, CASES)
    loop.run()
    assert feature.count_NV is not None and not feature.in_use
    assert operations(loop, start(loop, plain)) == before


class Made(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.num_bytes += result.nbytes
        return result


def test_what_the_memory_profile_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables, and all that the counting of a full step makes, whatever is freed in it."""
    for module in (penalties, memory):
        monkeypatch.setattr(module, "COUNTED_AT_ONCE", 1 << 11)
    loop = Loop(D2F, max_model_len=200)
    feature = loop.sampler.features[Penalties]
    shown = penalty_bytes(loop.sampler.size)
    for i in range(8):
        params = sampling(16, None, presence_penalty=1.0)
        loop.start([i] * 180, Hashed(i), params, f"{i}")
    tables = (feature.prompt_NV, feature.count_NV)
    stored = sum(table.nbytes for table in tables if table is not None)
    assert stored > 0
    made: list[int] = []
    start_rows = feature.start_rows

    def counted(*arguments: Any) -> None:
        with Made() as tensors:
            start_rows(*arguments)
        made.append(tensors.num_bytes)

    monkeypatch.setattr(feature, "start_rows", counted)
    loop.run()
    assert 0 < max(made) + stored <= shown < reserved_bytes(loop.sampler.size)
