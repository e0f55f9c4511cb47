"""Random models and settings: states and sampler decode as the plain loops do."""

from typing import Any

import numpy as np
import pytest
from scripted import Loop, Run, sampling
from scripted_plain import ScriptedModel
from scripted_rows import EOS, Hashed

from dllm_plugin.decoding.methods import METHODS
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


# Differential fuzz: random scripted models against the plain loops.


def d2f_case(
    rng: np.random.Generator, seed: int, shift: bool, context: int
) -> dict[str, Any]:
    """A random request as keyword arguments that both sides understand."""
    return {
        "seed": seed,
        "prompt": rng.integers(0, 14, rng.integers(1, 12)).tolist(),
        "block_length": int(rng.choice([1, 2, 4, 8])),
        "max_tokens": int(rng.integers(1, 34)),
        "add": float(rng.choice([0, 0.1, 0.5, 0.9, 1])),
        "activate": float(rng.choice([0, 0.1, 0.5, 0.9, 1])),
        "accept": float(rng.choice([0.3, 0.6, 0.9, 1])),
        "ranking": str(rng.choice(["threshold", "topk_margin", "entropy"])),
        "stops": frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
        "temperature": float(rng.choice([0, 0, 0, 0.8, 1.3])),
        "context": context,
        "shift": shift,
    }


def plain_text(case: dict[str, Any], strategy: str, **bounds: Any) -> Text:
    """What the plain loop makes of a case."""
    names = ("block_length", "temperature", "seed", "steps", "eps", "factor")
    names += PENALTIES
    rules = Rules(
        strategy,
        case["ranking"],
        threshold=case["accept"],
        block_add_threshold=case["add"],
        decoded_token_threshold=case["activate"],
        **{name: case[name] for name in names if name in case},
        **bounds,
    )
    model = ScriptedModel(Hashed(case["seed"]), case["shift"])
    length, context = case["max_tokens"], case["context"]
    text = Text(model, case["prompt"], length, rules, case["stops"], context)
    decode(text)
    return text


def most_bounds(text: Text) -> tuple[int, int]:
    """The most blocks and positions that a forward of the plain loop computed."""
    positions = max(one.length for one in text.forwards)
    return -(-positions // text.block_length), positions


def fuzz_params(case: dict[str, Any], **extra: Any) -> Any:
    return sampling(
        case["max_tokens"],
        ignore_eos=not case["stops"],
        temperature=case["temperature"],
        dllm_block_length=case["block_length"],
        dllm_policy=case["ranking"],
        seed=case["seed"],
        **{name: case[name] for name in PENALTIES if name in case},
        **extra,
    )


def run_batch(
    loop: Loop, cases: list[dict[str, Any]], extras: list[dict[str, Any]]
) -> list[Run]:
    """All cases together, arriving five a step."""
    runs = []
    for i, (case, extra) in enumerate(zip(cases, extras, strict=True)):
        params = fuzz_params(case, **extra)
        runs.append(
            loop.start(case["prompt"], Hashed(case["seed"]), params, req_id=str(i))
        )
        if i % 5 == 4:
            loop.step()
    loop.run()
    return runs


@pytest.mark.parametrize(
    "canvas,blocks", [(40, 40), (40, 3), (16, 16), (16, 2), (8, 8)]
)
@pytest.mark.parametrize("shift", [False, True])
def test_d2f_equals_the_plain_loop(shift: bool, canvas: int, blocks: int) -> None:
    """Tokens and passes, with and without a bound; the unbounded text unless the bound binds."""
    rng, num_cases = np.random.default_rng([canvas, blocks, shift]), 40
    dllm = {"strategy": "d2f", "block_length": 4, "canvas_length": canvas}
    loop = Loop(
        dllm | {"max_active_blocks": blocks}, shift, slots=num_cases, max_model_len=40
    )
    cases = [d2f_case(rng, seed, shift, context=40) for seed in range(num_cases)]
    names = {
        "add": "dllm_block_add_threshold",
        "activate": "dllm_decoded_token_threshold",
        "accept": "dllm_threshold",
    }
    extras = [{names[k]: case[k] for k in names} for case in cases]
    unbound = 0
    for case, run in zip(cases, run_batch(loop, cases, extras), strict=True):
        bounds = {"max_active_blocks": blocks, "canvas_length": canvas}
        bounded = plain_text(case, "d2f", **bounds)
        assert (run.output, len(run.passes)) == bounded.result(), case
        free = plain_text(case, "d2f")
        most_blocks, most_positions = most_bounds(free)
        if most_blocks <= blocks and most_positions <= canvas:
            unbound += 1
            assert run.output == free.answer(), case
    assert unbound > 5


def block_case(rng: np.random.Generator, seed: int, shift: bool) -> dict[str, Any]:
    """A random request for block diffusion, with any policy."""
    case = d2f_case(rng, seed, shift, context=40)
    case["ranking"] = str(
        rng.choice(list(METHODS["block_diffusion", "dream"].policies))
    )
    case["steps"] = min(
        int(rng.integers(1, 13)), 4 * case["block_length"]
    )  # more are refused
    case["eps"] = float(rng.choice([1e-3, 0.05]))
    case["factor"] = float(rng.choice([0.5, 1.0, 2.0]))
    return case


def block_arguments(case: dict[str, Any]) -> dict[str, Any]:
    """The request arguments that ask for a case's policy."""
    if case["ranking"] == "threshold":
        return {"dllm_threshold": case["accept"]}
    if case["ranking"] == "factor":
        return {"dllm_factor": case["factor"]}
    schedule = {"dllm_steps": case["steps"]}
    return schedule | ({"dllm_eps": case["eps"]} if case["shift"] else {})


@pytest.mark.parametrize("shift", [False, True])
def test_block_diffusion_equals_the_two_pass_form(shift: bool) -> None:
    """Every policy, in one batch; storing a block costs no pass of its own."""
    rng, num_cases = np.random.default_rng([77, shift]), 90
    dllm = {"strategy": "block_diffusion", "block_length": 8, "canvas_length": 16}
    loop = Loop(dllm, shift, slots=num_cases, max_model_len=40)
    cases = [block_case(rng, seed, shift) for seed in range(num_cases)]
    runs = run_batch(loop, cases, [block_arguments(case) for case in cases])
    for case, run in zip(cases, runs, strict=True):
        text = plain_text(case, "block_diffusion")
        assert (run.output, len(run.passes)) == text.result(), case
        # The two-pass form: with a canvas of one block, storing one takes a forward.
        size = case["block_length"]
        two_pass = plain_text(case, "block_diffusion", canvas_length=size)
        assert two_pass.answer() == run.output, case
