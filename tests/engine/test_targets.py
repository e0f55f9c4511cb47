"""Targets: masked positions take given tokens, and their log-probabilities are plain torch's."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from engines import (
    EngineRoom,
    a_prompt,
    generate,
    params,
    token_ids,
)
from full_jobs import EOS, Decoder, every_decoder, start
from vllm.exceptions import VLLMValidationError

from dllm_plugin.api.likelihood import METHODS
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.sampling.features.templates import Targets

PROMPTS = [a_prompt(9, 1), a_prompt(30, 2), a_prompt(45, 3)]
TEXTS = [a_prompt(12, 4), [*a_prompt(6, 5), EOS, 7, EOS], a_prompt(1, 6)]
OWN = {"full_refresh_every": 2, "refresh_before": 4}
WITHOUT_CACHE = "semi_autoregressive"


def target_params(text: list[int], masked: tuple[int, ...], **options: Any) -> Any:
    template = [-1 if place in masked else token for place, token in enumerate(text)]
    asked = {
        "dllm_template": template,
        "dllm_targets": [text[place] for place in masked],
    }
    return params(masked[-1] + 1, **{"logprobs": 0} | asked | options)


def plain_logprobs(
    model: PlainModel, context: list[int], text: list[int], masked: tuple[int, ...]
) -> list[float]:
    """One forward over everything, by plain torch."""
    noisy = [
        model.mask_id if place in masked else token for place, token in enumerate(text)
    ]
    logprobs = model.rows_at(0, context + noisy, {}).log_softmax(-1)
    rows = [len(context) + place - model.shift for place in masked]
    return [
        float(logprobs[row, text[place]])
        for row, place in zip(rows, masked, strict=True)
    ]


def told_logprobs(output: Any, masked: tuple[int, ...]) -> list[float]:
    answer = output.outputs[0]
    return [answer.logprobs[place][answer.token_ids[place]].logprob for place in masked]


def jobs() -> list[tuple[list[int], list[int], tuple[int, ...]]]:
    """Samples of every method for a few texts: context, text, masked positions."""
    found = []
    for context, text in zip(PROMPTS, TEXTS, strict=True):
        for draw in METHODS.values():
            found += [(context, text, one.masked) for one in draw(len(text), 6, 1)[:6]]
    return found


def check(model: PlainModel, outputs: list[Any]) -> None:
    for (context, text, masked), output in zip(jobs(), outputs, strict=True):
        assert token_ids(output) == text[: masked[-1] + 1], (
            "the targets and what is given"
        )
        expected = plain_logprobs(model, context, text, masked)
        np.testing.assert_allclose(told_logprobs(output, masked), expected, atol=1e-4)
        assert sum(output.outputs[0].spec_decode_metrics.histogram) == 1, "one forward"
        assert output.outputs[0].spec_decode_metrics.num_draft_tokens == len(
            context + text
        )


@every_decoder
def test_logprobs_of_given_masks(
    decoder: Decoder, llm: Any, plain_models: dict[str, PlainModel]
) -> None:
    """In a batch with ordinary requests, which decode what they would decode alone."""
    model = plain_models[decoder[0]]
    plain = [params(20), params(17, temperature=0.8, seed=3, logprobs=1)]
    alone = [generate(llm, [PROMPTS[0]], wish)[0] for wish in plain]
    wishes = [target_params(text, masked) for _, text, masked in jobs()]
    prompts = [context for context, _, _ in jobs()]
    order = list(range(len(wishes) + 2))
    random.Random(3).shuffle(order)
    everything = [*wishes, *plain], [*prompts, PROMPTS[0], PROMPTS[0]]
    outputs = generate(
        llm, [everything[1][i] for i in order], [everything[0][i] for i in order]
    )
    by_place = dict(zip(order, outputs, strict=True))
    check(model, [by_place[i] for i in range(len(wishes))])
    for one, other in zip(
        alone, (by_place[len(wishes)], by_place[len(wishes) + 1]), strict=True
    ):
        assert token_ids(one) == token_ids(other)


def test_what_the_engine_approximates_changes_nothing(
    room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    """Every such request is one refresh of everything; a policy of the engine's is not asked."""
    dllm = OWN | {
        "strategy": "dual_cache",
        "policy": "entropy",
        "block_length": 4,
        "steps": 2,
    }
    llm = room.start("llada", dllm, max_model_len=160)
    wishes = [
        target_params(text, masked, temperature=0.7) for _, text, masked in jobs()
    ]
    outputs = generate(llm, [context for context, _, _ in jobs()], wishes)
    check(plain_models["llada"], outputs)


def test_nobody_asks_and_nobody_pays(room: EngineRoom) -> None:
    """No table, also for requests with log-probabilities and templates."""
    llm = room.start("llada", {"strategy": "prefix_cache", "canvas_length": 32})
    generate(
        llm, PROMPTS[:2], [params(20, logprobs=2), params(3, dllm_template=[-1, 5, -1])]
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    feature = runner.model_state.sampler.features[Targets]
    assert feature.targets is None and not feature.in_use
    generate(llm, PROMPTS[:1], target_params([5, 6], (0, 1)))
    assert isinstance(
        runner.model_state.sampler.features[Targets].targets.gpu, torch.Tensor
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"dllm_targets": [5]},
        "dllm_targets holds 1 tokens, but dllm_template has 2 positions",
    ),
    ({"dllm_targets": 5}, "dllm_targets must be a list of token ids, got 5."),
    (
        {"dllm_targets": [5, "a"]},
        "dllm_targets must hold token ids, got 'a' at place 1.",
    ),
    ({"dllm_targets": [5, -1]}, "dllm_targets must hold token ids, got -1 at place 1."),
    ({"dllm_targets": [5, 300]}, r"dllm_targets holds the mask token \(id 300\)"),
    (
        {"dllm_targets": [5, 10**6]},
        "dllm_targets holds the token id 1000000, but the vocabulary",
    ),
    ({"dllm_template": None}, "dllm_targets needs dllm_template"),
    ({"logprobs": None}, "dllm_targets needs logprobs"),
    ({"ignore_eos": False}, "dllm_targets needs ignore_eos"),
    ({"stop_token_ids": [3]}, "stop_token_ids (needs a single gap|cannot be combined)"),
    ({"n": 2, "temperature": 1.0}, "n cannot be combined with dllm_targets"),
    ({"logit_bias": {5: 1.0}}, "logit_bias cannot be combined with dllm_targets"),
    (
        {"repetition_penalty": 1.1},
        "repetition_penalty cannot be combined with dllm_targets",
    ),
    ({"dllm_policy": "entropy"}, "'dllm_policy' has no effect with dllm_targets"),
    ({"dllm_foo": 1}, "Unknown request argument 'dllm_foo'"),
    ({"dllm_cfg_scale": 1.0}, "dllm_cfg_scale"),
]


@pytest.mark.parametrize("options,sentence", WRONG, ids=lambda value: str(value)[:40])
def test_refused_by_name(
    options: dict[str, Any], sentence: str, room: EngineRoom
) -> None:
    llm = start(room, ("llada", WITHOUT_CACHE))
    wish = target_params([5, 6, 7], (0, 2), **options)
    wish.extra_args = {name: v for name, v in wish.extra_args.items() if v is not None}
    with pytest.raises(VLLMValidationError, match=sentence):
        generate(llm, PROMPTS[:1], wish)


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_refused_if_a_block_sees_nothing_after_it(
    family: str, room: EngineRoom
) -> None:
    llm = room.start(family, {"strategy": "d2f"} if family == "llada" else {})
    for asked in ({}, {"dllm_template": [-1, 5]}):
        with pytest.raises(
            VLLMValidationError, match="needs (full attention|a model that sees)"
        ):
            generate(llm, PROMPTS[:1], params(1, logprobs=0, dllm_targets=[5], **asked))
