"""Options of full attention: checked, in range, and the authors' loops by one setting."""

from typing import Any

import pytest
from refusals import DREAM, LLADA, refusal, request_refusal, resolved

from dllm_plugin.config.options import (
    OPTIONS,
)
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.resolution import check_options_read

FULL = [
    ("semi_autoregressive", LLADA, "cfg_scale", 1.0),
    ("dual_cache", LLADA, "logits_eos_inf", True),
    ("prefix_cache", LLADA, "confidence_eos_eot_inf", 1),
    ("semi_autoregressive", DREAM, "alg_temp", 0.5),
    ("dual_cache", DREAM, "alg_temp", 0.5),
    ("semi_autoregressive", DREAM, "top_p", 0.9),
    ("prefix_cache", DREAM, "top_k", 8),
]


@pytest.mark.parametrize("strategy,architecture,name,value", FULL)
def test_options_of_full_attention(
    strategy: str, architecture: str, name: str, value: Any
) -> None:
    """Read where the reference has them; refused elsewhere, unless they ask for nothing."""
    other = DREAM if architecture == LLADA else LLADA
    policy = {"dllm_policy": "low_confidence"}
    argument = policy | {f"dllm_{name}": value}
    config = resolved(architecture, strategy=strategy)
    assert getattr(request_arguments(config, argument), name) == value
    check_options_read(config, {name: value})
    for wrong in (
        resolved(other, strategy=strategy),
        resolved(architecture, strategy="block_diffusion"),
    ):
        assert f"dllm_{name} has no effect" in request_refusal(wrong, **argument)
        with pytest.raises(ValueError, match=f"{name} has no effect"):
            check_options_read(wrong, {name: value})
        off = OPTIONS[name].off[0]
        request_arguments(wrong, policy | {f"dllm_{name}": off})
        check_options_read(wrong, {name: off})


def test_guidance_needs_the_uncached_loop() -> None:
    config = resolved(strategy="dual_cache")
    assert "dllm_cfg_scale has no effect" in request_refusal(config, dllm_cfg_scale=0.5)


@pytest.mark.parametrize(
    "name,value,says",
    [
        ("alg_temp", -1.0, "between 0.0 and 1000.0"),
        ("alg_temp", False, "between 0.0 and 1000.0"),
        ("cfg_scale", float("inf"), "between 0.0 and 1000.0"),
        ("top_k", False, "between 0 and 16777216"),
        ("top_p", 0.0, "greater than 0"),
        ("top_p", 1.5, "between 0.0 and 1.0"),
        ("top_k", -1, "between 0 and 16777216"),
        ("top_k", 2.5, "between 0 and 16777216"),
        ("top_k", 2**63, "between 0 and 16777216"),
        ("logits_eos_inf", "yes", "true or false"),
        ("use_block_cache", None, "true or false"),
        ("confidence_eos_eot_inf", 2, "true or false"),
    ],
)
def test_ranges_of_full_attention(name: str, value: Any, says: str) -> None:
    assert refusal(**{name: value}).startswith(f"{name} must be ") and says in refusal(
        **{name: value}
    )


def test_the_authors_loops_are_one_setting_away() -> None:
    """LLaDA decodes blocks of 32 by its quota, Dream the whole canvas by its time schedule."""
    llada = resolved(strategy="semi_autoregressive")
    assert (llada.policy, llada.block_length, llada.whole_canvas) == (
        "low_confidence",
        32,
        False,
    )
    dream = resolved(DREAM, strategy="semi_autoregressive")
    assert (dream.policy, dream.whole_canvas) == ("entropy", True)
    request = request_arguments(dream, {}, max_tokens=48)
    assert (request.block_length, request.steps) == (48, 48)
    assert (
        request_arguments(dream, {}, max_tokens=5000).block_length
        == dream.canvas_length
    )
    assert (
        request_arguments(dream, {"dllm_block_length": 16}, max_tokens=48).block_length
        == 16
    )
    # By threshold Dream's loop releases positions over `steps`; the default is all at once.
    assert (
        request_arguments(dream, {"dllm_policy": "threshold"}, max_tokens=48).steps == 1
    )


def test_a_cached_block_of_dream_takes_two_steps() -> None:
    with pytest.raises(ValueError, match="steps must be at least 2"):
        check_options_read(
            resolved(DREAM, strategy="dual_cache", steps=1), {"steps": 1}
        )
    config = resolved(DREAM, strategy="prefix_cache")
    assert "dllm_steps must be at least 2" in request_refusal(config, dllm_steps=1)
