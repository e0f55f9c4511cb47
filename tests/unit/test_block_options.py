"""Options of the block-causal families: defaults, ranges, and where each is refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import Options
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.resolution import check_options_read, resolve
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.models.checkpoints.trained_for import trained_to_edit

LLADA, SDAR, LLADA2 = "LLaDAModelLM", "SDARForCausalLM", "LLaDA2MoeModelLM"
FAST = "Fast_dLLM_QwenForCausalLM"


def resolved(architecture: str, edits: bool = False, **options: Any) -> DecodeConfig:
    trained = FAMILIES[architecture].block_length
    config = resolve(
        Options.from_user(options),
        architecture,
        1024,
        15,
        block_length=trained,
        edits=edits,
    )
    check_options_read(config, options)
    return config


def refusal(build: Any, **arguments: Any) -> str:
    """What a configuration (given by its options) or a request to it is refused with."""
    with pytest.raises(ValueError) as caught:
        build(**arguments) if callable(build) else request_arguments(build, arguments)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 450
    return message


@pytest.mark.parametrize(
    "architecture,edits,policy,threshold,block,sub",
    [
        (SDAR, False, "threshold", 0.85, 4, 0),
        ("SDARMoeForCausalLM", False, "threshold", 0.85, 4, 0),
        (LLADA2, False, "threshold", 0.95, 32, 0),
        (LLADA2, True, "joint_threshold", 0.7, 32, 0),
        (FAST, False, "threshold", 0.9, 32, 8),
    ],
)
def test_defaults(
    architecture: str, edits: bool, policy: str, threshold: float, block: int, sub: int
) -> None:
    engine = resolved(architecture, edits)
    config = engine.defaults
    assert (engine.strategy, config.policy) == ("block_diffusion", policy)
    assert (config.threshold, config.block_length) == (threshold, block)
    assert config.sub_block_length == sub and config.max_active_blocks == 1
    assert (
        config.editing_threshold,
        config.max_post_steps,
        config.num_to_transfer,
    ) == (0.5, 16, 1)
    assert not config.use_block_cache


def test_auto_is_the_same_for_a_request() -> None:
    assert (
        request_arguments(resolved(LLADA2, True), {"dllm_policy": "auto"}).policy
        == "joint_threshold"
    )
    assert (
        request_arguments(resolved(LLADA2, False), {"dllm_policy": "auto"}).policy
        == "threshold"
    )


def test_the_canvas_holds_the_block_that_is_stored_if_it_may_ride_along() -> None:
    assert resolved(SDAR).canvas_length == 8 and resolved(LLADA2).canvas_length == 64
    assert resolved(FAST).canvas_length == 32 and resolved(FAST).dedicated_commit
    several = resolved(FAST, max_active_blocks=3)
    assert several.canvas_length == 128 and not several.dedicated_commit
    assert resolved(SDAR, max_active_blocks=4).canvas_length == 20
    assert (
        resolved(LLADA, strategy="block_diffusion", max_active_blocks=2).canvas_length
        == 96
    )
    assert not resolved(SDAR).dedicated_commit


@pytest.mark.parametrize("value", [-0.1, 1.1, None, True, "0.5", float("nan"), [0.5]])
def test_editing_threshold_is_a_share(value: Any) -> None:
    says = f"editing_threshold must be a number between 0.0 and 1.0, got {value!r}"
    assert says in refusal(resolved(LLADA2, True), dllm_editing_threshold=value)
    if value is None:  # the engine's own default, as that of `threshold`
        assert resolved(LLADA2, True, editing_threshold=None)
        return
    assert says in refusal(
        lambda **o: resolved(LLADA2, True, **o), editing_threshold=value
    )


@pytest.mark.parametrize(
    "name,value,low",
    [
        *(
            ("num_to_transfer", value, 1)
            for value in (0, -1, None, True, 1.0, "1", 4097)
        ),
        *(("max_post_steps", value, 0) for value in (-1, None, False, 2.5, 10**9)),
    ],
)
def test_whole_numbers_of_edits(name: str, value: Any, low: int) -> None:
    says = f"{name} must be a whole number between {low} and 4096, got {value!r}"
    assert says in refusal(lambda **o: resolved(LLADA2, True, **o), **{name: value})
    assert says in refusal(resolved(LLADA2, True), **{f"dllm_{name}": value})


def test_no_edit_steps_and_big_transfers_are_values_like_others() -> None:
    request = request_arguments(
        resolved(LLADA2, True),
        {
            "dllm_max_post_steps": 0,
            "dllm_num_to_transfer": 99,
            "dllm_editing_threshold": 0,
        },
    )
    assert (request.max_post_steps, request.num_to_transfer) == (0, 99)
    assert request.editing_threshold == 0


@pytest.mark.parametrize("value", [0, -8, None, True, 8.0, "8"])
def test_sub_block_length_is_a_whole_number(value: Any) -> None:
    says = f"sub_block_length must be a whole number between 1 and 4096, got {value!r}"
    assert says in refusal(resolved(FAST), dllm_sub_block_length=value)
    says = f"sub_block_length must be a whole number of at least 1, got {value!r}"
    if value is not None:  # of the engine, that is the family's own
        assert says in refusal(lambda **o: resolved(FAST, **o), sub_block_length=value)


@pytest.mark.parametrize("value", [None, "yes", 2, -1])
def test_use_block_cache_is_a_switch(value: Any) -> None:
    says = f"use_block_cache must be true or false, got {value!r}"
    assert says in refusal(resolved(FAST), dllm_use_block_cache=value)
    assert says in refusal(lambda **o: resolved(FAST, **o), use_block_cache=value)


@pytest.mark.parametrize("on", [True, 1])
def test_the_cache_of_a_block_is_that_of_one_block(on: Any) -> None:
    assert request_arguments(
        resolved(FAST), {"dllm_use_block_cache": on}
    ).use_block_cache
    assert resolved(FAST, use_block_cache=on).defaults.use_block_cache
    says = "use_block_cache needs kv_cache_layout 'unified'"
    assert says in refusal(
        resolved(FAST, kv_cache_layout="distinct"), dllm_use_block_cache=on
    )
    says = "use_block_cache needs max_active_blocks 1, got 2"
    several = resolved(FAST, max_active_blocks=2)
    assert says in refusal(several, dllm_use_block_cache=on)
    assert says in refusal(several, dllm_use_block_cache=on, dllm_max_active_blocks=1)
    assert says in refusal(
        lambda **o: resolved(FAST, **o), use_block_cache=on, max_active_blocks=2
    )


@pytest.mark.parametrize("architecture", [SDAR, LLADA2, LLADA])
@pytest.mark.parametrize(
    "name,value", [("sub_block_length", 4), ("use_block_cache", True)]
)
def test_sub_blocks_are_those_of_fast_dllm(
    architecture: str, name: str, value: Any
) -> None:
    strategy = {"strategy": "block_diffusion"}
    message = refusal(
        lambda **o: resolved(architecture, **o), **{name: value}, **strategy
    )
    assert message.startswith(f"{name} has no effect") and architecture in message
    message = refusal(resolved(architecture, **strategy), **{f"dllm_{name}": value})
    assert f"dllm_{name} has no effect" in message


@pytest.mark.parametrize("architecture", [SDAR, FAST, LLADA])
def test_edits_are_those_of_llada2(architecture: str) -> None:
    strategy, joint = {"strategy": "block_diffusion"}, "joint_threshold"
    message = refusal(lambda **o: resolved(architecture, **o), policy=joint, **strategy)
    assert (
        message.startswith(f"policy '{joint}' has no meaning")
        and "threshold" in message
    )
    message = refusal(resolved(architecture, **strategy), dllm_policy=joint)
    assert f"dllm_policy '{joint}' has no meaning" in message
    assert request_arguments(resolved(LLADA2), {"dllm_policy": joint}).policy == joint


@pytest.mark.parametrize(
    "name", ["editing_threshold", "max_post_steps", "num_to_transfer"]
)
def test_numbers_of_edits_need_the_policy_that_edits(name: str) -> None:
    value = 0.5 if name == "editing_threshold" else 3
    config = resolved(LLADA2, True)
    assert getattr(request_arguments(config, {f"dllm_{name}": value}), name) == value
    message = refusal(config, **{f"dllm_{name}": value, "dllm_policy": "threshold"})
    assert f"dllm_{name} has no effect" in message
    assert f"{name} has no effect" in refusal(
        lambda **o: resolved(SDAR, **o), **{name: value}
    )
    assert resolved(
        LLADA2, **{name: value}
    )  # some policy of the engine's requests reads it


@pytest.mark.parametrize("architecture", [SDAR, LLADA2, FAST, LLADA, "DreamModel"])
def test_several_active_blocks(architecture: str) -> None:
    """Up to the engine's; schedules count the steps of one block and stay with one."""
    strategy = {"strategy": "block_diffusion"}
    config = resolved(architecture, max_active_blocks=3, **strategy)
    assert request_arguments(config, {}).max_active_blocks == 3
    assert (
        request_arguments(config, {"dllm_max_active_blocks": 2}).max_active_blocks == 2
    )
    assert (
        request_arguments(config, {"dllm_policy": "low_confidence"}).max_active_blocks
        == 1
    )
    message = refusal(config, dllm_max_active_blocks=4)
    assert "dllm_max_active_blocks 4 exceeds the engine's 3" in message
    assert "at least 1, got None" in refusal(config, dllm_max_active_blocks=None)
    message = refusal(config, dllm_policy="factor", dllm_max_active_blocks=2)
    assert "dllm_max_active_blocks has no effect" in message
    request_arguments(config, {"dllm_policy": "factor", "dllm_max_active_blocks": 1})
    one = resolved(architecture, **strategy)
    assert "exceeds the engine's 1" in refusal(one, dllm_max_active_blocks=2)


def test_full_attention_has_one_block() -> None:
    message = refusal(
        lambda **o: resolved(LLADA, **o), strategy="dual_cache", max_active_blocks=2
    )
    assert message.startswith(
        "max_active_blocks has no effect with strategy 'dual_cache'"
    )


@pytest.mark.parametrize(
    "model,model_type,edits",
    [
        ("inclusionAI/LLaDA2.1-mini", "llada2_moe", True),
        ("/models/llada2.1-flash", "llada2_moe", True),
        ("hub/models--inclusionAI--LLaDA2.1-mini/snapshots/abc", "llada2_moe", True),
        ("somewhere/checkpoint", "llada21_moe", True),
        ("inclusionAI/LLaDA2.0-mini", "llada2_moe", False),
        ("somewhere/checkpoint", "llada2_moe", False),
    ],
)
def test_trained_to_edit(model: str, model_type: str, edits: bool) -> None:
    hf_config = SimpleNamespace(model_type=model_type, source_name=None)
    config: Any = SimpleNamespace(model=model, hf_config=hf_config)
    assert trained_to_edit(config, FAMILIES[LLADA2]) is edits
    assert trained_to_edit(config, FAMILIES[SDAR]) is False


def test_active_blocks_must_fit_the_canvas() -> None:
    says = "max_active_blocks 3 of 32 positions do not fit canvas_length 64"
    build = lambda **o: resolved(FAST, **o)  # noqa: E731
    assert says in refusal(build, max_active_blocks=3, canvas_length=64)
    assert resolved(FAST, max_active_blocks=2, canvas_length=64).canvas_length == 64


def test_sub_blocks_have_a_longest() -> None:
    assert "between 1 and 4096" in refusal(resolved(FAST), dllm_sub_block_length=2**63)
