"""Every request argument: known, in range, honoured or refused by name."""

import dataclasses
from typing import Any

import pytest
from refusals import DREAM, request_refusal, resolved

from dllm_plugin.config.request.parsing import request_arguments


def test_a_request_without_arguments_takes_the_engine_numbers() -> None:
    config = resolved(strategy="d2f", threshold=0.7)
    for arguments in (None, {}, {"kv_transfer_params": 1}):
        request = request_arguments(config, arguments)
        assert request == dataclasses.replace(
            config.defaults, steps=config.block_length
        )
    assert request_arguments(resolved(steps=5), {}).steps == 5


def test_a_request_overrides_numbers() -> None:
    config = resolved(strategy="d2f")
    request = request_arguments(
        config, {"dllm_threshold": 0.5, "dllm_block_length": 16}
    )
    assert (request.threshold, request.block_length, request.steps) == (0.5, 16, 16)
    assert config.defaults.threshold == 0.9
    config = resolved(DREAM)
    request = request_arguments(
        config, {"dllm_policy": "entropy", "dllm_steps": 7, "dllm_eps": 0.01}
    )
    assert (request.policy, request.steps, request.eps) == ("entropy", 7, 0.01)
    assert (
        request_arguments(resolved(policy="factor"), {"dllm_policy": "auto"}).policy
        == "threshold"
    )


@pytest.mark.parametrize(
    "argument,value,says",
    [
        ("dllm_threshold", 1.5, "between 0.0 and 1.0, got 1.5"),
        ("dllm_threshold", "high", "got 'high'"),
        ("dllm_block_length", 0, "at least 1, got 0"),
        ("dllm_block_length", 200, "longer than the canvas of 128"),
        ("dllm_max_active_blocks", 9, "exceeds the engine's 8"),
        ("dllm_max_active_blocks", None, "at least 1, got None"),
        ("dllm_block_add_threshold", -1, "between 0.0 and 1.0"),
        ("dllm_decoded_token_threshold", 2, "between 0.0 and 1.0"),
        ("dllm_policy", "nonsense", "is unknown"),
        ("dllm_policy", "origin", "has no meaning"),
        ("dllm_factor", 1.0, "has no effect with strategy 'd2f'"),
        ("dllm_steps", 4, "has no effect with strategy 'd2f'"),
        ("dllm_eps", 0.5, "has no effect with strategy 'd2f'"),
    ],
)
def test_refused_request_arguments_of_d2f(argument: str, value: Any, says: str) -> None:
    message = request_refusal(resolved(strategy="d2f"), **{argument: value})
    assert (
        message.startswith(f"Request argument refused: {argument} ") and says in message
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"dllm_threshold": 0.5, "dllm_policy": "low_confidence"},
        {"dllm_eps": 0.5, "dllm_policy": "low_confidence"},
        {"dllm_factor": 1.0},
        {"dllm_steps": 4, "dllm_policy": "factor"},
        {"dllm_block_add_threshold": 0.5, "dllm_policy": "factor"},
        {"dllm_decoded_token_threshold": 0.5, "dllm_policy": "random"},
        {"dllm_editing_threshold": 0.5},
        {"dllm_sub_block_length": 8},
    ],
)
def test_numbers_without_effect_on_block_diffusion(arguments: dict[str, Any]) -> None:
    """The first argument of each is what the strategy or policy never reads."""
    message = request_refusal(resolved(strategy="block_diffusion"), **arguments)
    assert message.startswith(
        f"Request argument refused: {next(iter(arguments))} has no effect"
    )


@pytest.mark.parametrize("name", ["steps", "max_post_steps"])
def test_more_forwards_than_a_block_can_use(name: str) -> None:
    """Four for each position, 32 at least, or what the engine's own option says."""
    edits = name == "max_post_steps"
    policy = "joint_threshold" if edits else "low_confidence"
    model = "LLaDA2MoeModelLM" if edits else "LLaDAModelLM"
    options: dict[str, Any] = {"dllm_block_length": 16, "dllm_policy": policy}
    config = resolved(model, strategy="block_diffusion")
    assert (
        getattr(request_arguments(config, options | {f"dllm_{name}": 64}), name) == 64
    )
    message = request_refusal(config, **options, **{f"dllm_{name}": 65})
    assert message.startswith(f"Request argument refused: dllm_{name} 65 exceeds 64")
    assert f"lower {name} or raise it" in message
    short = options | {"dllm_block_length": 1}
    assert getattr(request_arguments(config, short | {f"dllm_{name}": 32}), name) == 32
    assert "exceeds 64" in request_refusal(config, **short, **{f"dllm_{name}": 65})
    own = resolved(model, strategy="block_diffusion", **{name: 100})
    assert getattr(request_arguments(own, options | {f"dllm_{name}": 100}), name) == 100
    assert "exceeds 100" in request_refusal(own, **options, **{f"dllm_{name}": 101})


def test_what_a_request_reports() -> None:
    config = resolved()
    silent = request_arguments(config, {"dllm_threshold": 0.5})
    assert (silent.statistics, silent.is_watched) == (1, False)
    asked = {"dllm_statistics": 0, "dllm_frames": 2, "session_id": "x"}
    told = request_arguments(config, asked)
    assert (told.statistics, told.frames, told.is_watched) == (0, 2, True)
    message = request_refusal(config, dllm_statistics=2)
    assert "dllm_statistics must be a whole number between 0 and 1" in message


def test_steps_of_one_block_of_gaps() -> None:
    """All gaps are one block by default, so it may take as many steps as it has positions."""
    config = resolved(strategy="dual_cache")
    asked = {"dllm_template": [-1] * 200, "dllm_steps": 200}
    assert request_arguments(config, asked, 200).steps == 200
    with pytest.raises(ValueError, match="dllm_steps 801 exceeds 800"):
        request_arguments(config, asked | {"dllm_steps": 801}, 200)
