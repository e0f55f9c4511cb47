"""Full-attention requests with what the plain loops make of them."""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from engines import (
    CANVAS,
    CONTEXT,
    EngineRoom,
    a_prompt,
    forwards,
    generate,
    params,
    scheduler,
    token_ids,
)
from jobs import plain_model

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

DECODERS = [
    (family, strategy)
    for family in ("llada", "dream")
    for strategy in ("semi_autoregressive", "prefix_cache", "dual_cache")
]
# Module scope lets pytest run all tests of one family and strategy on one engine.
every_decoder = pytest.mark.parametrize(
    "decoder", DECODERS, ids="-".join, scope="module"
)
Decoder = tuple[str, str]  # family and strategy
EOS, EOT = 257, 312  # of tiny-llada
TOO_CLOSE = 3e-4  # a decision that float32 may make either way
OF_VLLM = ("temperature", "seed")
DECODED: dict[
    str, Text
] = {}  # what the plain loops made of jobs that several tests send


@dataclass(frozen=True)
class FullJob:
    """One request; `numbers` are the plugin's without their prefix, and vLLM's `OF_VLLM`."""

    prompt: list[int]
    max_tokens: int
    numbers: dict[str, Any] = field(default_factory=dict)
    stop: tuple[int, ...] = ()

    def wish(self, **options: Any) -> Any:
        """SamplingParams."""
        names = {
            name: name if name in OF_VLLM else f"dllm_{name}" for name in self.numbers
        }
        options |= {names[name]: value for name, value in self.numbers.items()}
        return params(self.max_tokens, stop_token_ids=list(self.stop), **options)

    def decode(
        self, decoder: Decoder, canvas: int = CANVAS, lost: Collection[int] = ()
    ) -> Text:
        """By the plain loops, once; `lost`: lengths of the answer at which the cache is lost."""
        wanted = repr((self, decoder, canvas, sorted(lost)))
        if wanted not in DECODED:
            DECODED[wanted] = self.text(decoder, canvas, lost)
            decode(DECODED[wanted])
        return DECODED[wanted]

    def text(self, decoder: Decoder, canvas: int, lost: Collection[int]) -> Text:
        """The text that the plain loops decode."""
        family, strategy = decoder
        numbers = {"policy": "low_confidence"} | self.numbers
        rules = Rules(strategy, canvas_length=canvas, eos=EOS, eot=EOT, **numbers)
        model, stop = plain_model(family), self.stop
        text = Text(model, self.prompt, self.max_tokens, rules, stop, CONTEXT)
        text.lost = lost
        return text


def start(
    room: EngineRoom, decoder: Decoder, canvas: int = CANVAS, **options: Any
) -> Any:
    """The engine of a decoder."""
    family, strategy = decoder
    dllm = {"strategy": strategy, "canvas_length": canvas}
    return room.start(family, dllm, **{"max_model_len": CONTEXT} | options)


def run(llm: Any, jobs: Sequence[FullJob], **options: Any) -> list[Any]:
    """Outputs of jobs that are submitted together."""
    return generate(
        llm, [job.prompt for job in jobs], [job.wish(**options) for job in jobs]
    )


def run_interrupted(
    llm: Any,
    jobs: Sequence[tuple[list[int], Any]],
    every: int,
    lost: list[set[int]] | None = None,
) -> list[Any]:
    """Outputs of (prompt, wish) pairs; all that is running is preempted every so many steps.

    `lost` receives the lengths that each answer had whenever its request lost its cache.
    """
    engine, step, done, began = llm.llm_engine, 0, {}, time.monotonic()
    for i, (prompt, wish) in enumerate(jobs):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, wish)
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        step += bool(scheduler(llm).running)  # nothing runs while grammars are compiled
        assert step < 1000 and time.monotonic() - began < 600, "no progress"
        if step % every == 0:
            for request in scheduler(llm).running if lost is not None else ():
                lost[int(request.request_id.partition("-")[0])].add(
                    request.num_output_tokens
                )
            llm.reset_prefix_cache(reset_running_requests=True)
    return [done[str(i)] for i in range(len(jobs))]


def check(job: FullJob, text: Text, output: Any) -> None:
    """Tokens and forwards of a request that nothing interrupted."""
    assert token_ids(output) == text.answer(), job
    assert forwards(output) == len(text.forwards), job


def numbers_for(decoder: Decoder, draw: random.Random) -> dict[str, Any]:
    """Random settings that mean something to a decoder."""
    family, strategy = decoder
    in_own_loop, is_dream = strategy == "semi_autoregressive", family == "dream"
    policies = [
        "threshold",
        "low_confidence",
        "entropy",
        "topk_margin",
        "random",
        "factor",
    ]
    if in_own_loop and is_dream:
        policies.append("origin")
    policy = draw.choice(policies)
    numbers: dict[str, Any] = {"policy": policy, "seed": draw.randrange(2**40)}
    if not (in_own_loop and is_dream and draw.random() < 0.3):
        numbers["block_length"] = draw.choice([1, 2, 4, 8, 13, 16, 32])
    if draw.random() < 0.7:
        numbers["steps"] = draw.choice([2, 3, 4, 6, 8, 16])
    if policy == "threshold":
        numbers["threshold"] = draw.choice([0.0, 0.3, 0.6, 0.9, 1.0])
    elif policy == "factor":
        numbers["factor"] = draw.choice([0.4, 1.0, 2.0])
    elif is_dream and draw.random() < 0.3:
        numbers["eps"] = draw.choice([0.01, 0.1, 0.5])
    if is_dream and policy != "random" and draw.random() < 0.3:
        numbers |= draw.choice(
            [{"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.9, "top_k": 3}]
        )
    if policy in ("low_confidence", "entropy", "topk_margin") and is_dream:
        numbers |= draw.choice([{}, {}, {"alg_temp": 0.4}])
    if not is_dream and policy in ("low_confidence", "threshold", "factor"):
        numbers |= draw.choice(
            [{}, {"logits_eos_inf": True}, {"confidence_eos_eot_inf": True}]
        )
        if in_own_loop:
            numbers |= draw.choice([{}, {"cfg_scale": 0.5}, {"cfg_scale": 1.5}])
    return numbers


def approximations_for(decoder: Decoder, draw: random.Random) -> dict[str, Any]:
    """Random settings of refreshes that cost less."""
    numbers = (
        {"suffix_window": draw.choice([0, 3, 16, 200])} if draw.random() < 0.7 else {}
    )
    if decoder[1] != "semi_autoregressive" and draw.random() < 0.8:
        numbers["full_refresh_every"] = draw.choice([2, 3, 8])
        if draw.random() < 0.7:
            numbers["refresh_before"] = draw.choice([1, 4, 32, 500])
    return numbers


def random_jobs(
    decoder: Decoder, wanted: int, seed: int = 0, approximate: bool = False
) -> list[tuple[FullJob, Text]]:
    """Jobs without close calls: short and long ones, some ended by a stop or the context."""
    draw, found = random.Random(f"{decoder} {seed}"), []
    for trial in range(4 * wanted):
        numbers = numbers_for(decoder, draw)
        if approximate and "cfg_scale" not in numbers:
            numbers |= approximations_for(decoder, draw)
        length = (
            draw.randint(1, 60)
            if draw.random() < 0.8
            else draw.randint(120, CONTEXT - 1)
        )
        job = FullJob(a_prompt(length, trial), draw.randint(1, 70), numbers)
        text = job.decode(decoder)
        if draw.random() < 0.3 and text.margin > TOO_CLOSE:
            job = FullJob(
                job.prompt, job.max_tokens, numbers, (draw.choice(text.answer()),)
            )
            text = job.decode(decoder)
        if text.margin > TOO_CLOSE:
            found.append((job, text))
        if len(found) == wanted:
            return found
    raise AssertionError("too many close calls")


def check_preempted(llm: Any, decoder: Decoder, jobs: Sequence[FullJob]) -> int:
    """Requests that lose their cache decode as the plain loop does that loses it there, too.

    A block takes three steps at most, since one that is preempted more often gets nowhere. Returns
    how often a request lost its cache.
    """
    numbers = {"steps": 3, "block_length": 8}
    jobs = [replace(job, numbers=job.numbers | numbers) for job in jobs]
    lost = [set[int]() for _ in jobs]
    outputs = run_interrupted(llm, [(job.prompt, job.wish()) for job in jobs], 4, lost)
    compared = 0
    for job, output, places in zip(jobs, outputs, lost, strict=True):
        text = job.decode(decoder, lost=places)
        if text.margin > TOO_CLOSE:
            assert token_ids(output) == text.answer(), (job, places)
            compared += 1
    assert compared > len(jobs) // 2
    return sum(map(len, lost))
