"""Every decode option: known, in range, honoured or refused by name."""

import dataclasses
from typing import Any

import pytest
from refusals import DREAM, LLADA, MASK, refusal, request_refusal, resolved

import dllm_plugin
from dllm_plugin.config.options import (
    KV_CACHE_LAYOUTS,
    OPTIONS,
    REQUEST_PREFIX,
    Options,
)
from dllm_plugin.config.request.arguments import ARGUMENTS
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.resolution import check_options_read, resolve
from dllm_plugin.config.validation import Choice
from dllm_plugin.decoding.families import FAMILIES, POLICY_NAMES
from dllm_plugin.decoding.methods import methods_of

FIELDS = [
    "adaptive",
    "alg_temp",
    "allow_unverified",
    "block_add_threshold",
    "block_length",
    "canvas_length",
    "cfg_scale",
    "commit_alone_from",
    "compile_step",
    "confidence_eos_eot_inf",
    "decoded_token_threshold",
    "draft_adapter",
    "editing_threshold",
    "entropy_temperature",
    "entropy_threshold",
    "eps",
    "factor",
    "full_refresh_every",
    "head_quantization",
    "kv_cache_layout",
    "logits_eos_inf",
    "lora_path",
    "max_active_blocks",
    "max_post_steps",
    "max_window",
    "merged_updates",
    "min_window",
    "num_to_transfer",
    "policy",
    "position_penalty",
    "refresh_before",
    "steps",
    "strategy",
    "sub_block_length",
    "suffix_window",
    "threshold",
    "top_k",
    "top_p",
    "use_block_cache",
    "vocab_parallel",
    "window",
]
REQUEST_ARGUMENTS = [
    "dllm_add_eos_at_end",
    "dllm_alg_temp",
    "dllm_block_add_threshold",
    "dllm_block_length",
    "dllm_cfg_scale",
    "dllm_confidence_eos_eot_inf",
    "dllm_decoded_token_threshold",
    "dllm_early_text",
    "dllm_editing_threshold",
    "dllm_end_think_token_id",
    "dllm_entropy_temperature",
    "dllm_entropy_threshold",
    "dllm_eps",
    "dllm_factor",
    "dllm_frames",
    "dllm_full_refresh_every",
    "dllm_grammar",
    "dllm_logits_eos_inf",
    "dllm_max_active_blocks",
    "dllm_max_post_steps",
    "dllm_max_thinking_tokens",
    "dllm_num_to_transfer",
    "dllm_policy",
    "dllm_position_penalty",
    "dllm_refresh_before",
    "dllm_schedule",
    "dllm_statistics",
    "dllm_steps",
    "dllm_sub_block_length",
    "dllm_suffix_window",
    "dllm_targets",
    "dllm_template",
    "dllm_threshold",
    "dllm_top_k",
    "dllm_top_p",
    "dllm_trace",
    "dllm_use_block_cache",
    "dllm_window",
]


def test_public_surface_is_frozen() -> None:
    """Change these lists on purpose, with the changelog; docs/options.md lists new arguments."""
    assert sorted(f.name for f in dataclasses.fields(Options)) == FIELDS
    assert dllm_plugin.__all__ == ["__version__", "register"]
    assert OPTIONS["strategy"].check == Choice(
        (
            *("auto", "d2f", "block_diffusion", "self_speculation", "introspective"),
            *("causal_window", "semi_autoregressive", "prefix_cache", "dual_cache"),
        )
    )
    assert OPTIONS["policy"].check == Choice(
        (
            *("auto", "threshold", "factor", "low_confidence", "entropy"),
            *("topk_margin", "random", "origin", "sequential", "joint_threshold"),
        )
    )
    assert KV_CACHE_LAYOUTS == ("auto", "unified", "distinct")
    assert {*REQUEST_ARGUMENTS} <= {REQUEST_PREFIX + name for name in ARGUMENTS}


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    message = refusal(treshold=0.5)
    assert "'treshold'" in message and all(name in message for name in FIELDS)
    for internal in ("architecture", "mask_token_id", "reason", "turn_end_token_ids"):
        assert f"'{internal}'" in refusal(**{internal: "x"})


@pytest.mark.parametrize(
    "name", ["block_length", "canvas_length", "max_active_blocks", "steps"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "8", True, [8], float("nan")])
def test_whole_numbers(name: str, value: Any) -> None:
    assert refusal(**{name: value}).startswith(
        f"{name} must be a whole number of at least 1"
    )


@pytest.mark.parametrize(
    "name,high",
    [
        ("threshold", 1.0),
        ("block_add_threshold", 1.0),
        ("decoded_token_threshold", 1.0),
        ("eps", 1.0),
        ("factor", 1000.0),
        ("cfg_scale", 1000.0),
    ],
)
def test_numbers(name: str, high: float) -> None:
    none = [] if name == "threshold" else [None]  # which means the family's own
    for value in [-0.1, float("nan"), "0.5", True, [0.5], *none, 2 * high]:
        assert refusal(**{name: value}).startswith(f"{name} must be a number ")
    for value in (0, 0.0, 1, 1.0, high):
        assert getattr(Options.from_user({name: value}), name) == value


def test_choices() -> None:
    for name, known in (
        ("strategy", "d2f"),
        ("policy", "entropy"),
        ("kv_cache_layout", "unified"),
    ):
        for value in ("nonsense", "", None, 3, ["d2f"]):
            message = refusal(**{name: value})
            assert (
                message.startswith(f"{name} {value!r} is unknown") and known in message
            )


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("strategy", methods_of(FAMILIES[LLADA]))
@pytest.mark.parametrize("architecture", [LLADA, DREAM])
def test_every_strategy_with_every_policy(
    architecture: str, strategy: str, policy: str
) -> None:
    """Taken where it means something; refused with the list of those that do elsewhere."""
    config = resolved(architecture, strategy=strategy)
    if policy in config.method.policies:
        assert request_arguments(config, {"dllm_policy": policy}).policy == policy
    else:
        message = request_refusal(config, dllm_policy=policy)
        assert f"{policy!r} has no meaning" in message and "threshold" in message


def test_no_adapter_is_given_by_an_empty_name() -> None:
    assert resolved(lora_path="").strategy == resolved().strategy


def test_merged_updates_need_an_adapter() -> None:
    check_options_read(resolved(lora_path="somewhere", merged_updates=True), {})
    with pytest.raises(
        ValueError, match="merged_updates has no effect without lora_path"
    ):
        check_options_read(resolved(merged_updates=True), {})


def test_lora_path_is_a_folder_name() -> None:
    assert refusal(lora_path=3).startswith("lora_path must be a folder name")


def test_options_without_a_default_are_refused_when_missing() -> None:
    """None is no block length: a sentence, not a TypeError from inside."""
    assert "block_length" in request_refusal(
        resolved(strategy="d2f"), dllm_block_length=None
    )


def test_auto_choices() -> None:
    plain, adapted = resolved(), resolved(lora_path="somewhere")
    assert (plain.strategy, plain.policy) == ("dual_cache", "threshold")
    assert (adapted.strategy, adapted.policy) == ("d2f", "threshold")
    assert (plain.canvas_length, adapted.canvas_length) == (256, 128)
    assert resolved(strategy="block_diffusion").canvas_length == 64
    assert (plain.block_length, adapted.block_length) == (32, 32)
    assert "adapter" in plain.reason and "adapter" in adapted.reason
    assert "'d2f'" in resolved(strategy="d2f").reason
    assert plain.kv_cache_layout == "unified" and plain.mask_token_id == MASK
    assert resolved(kv_cache_layout="distinct").kv_cache_layout == "distinct"


@pytest.mark.parametrize(
    "options,canvas,blocks",
    [
        ({}, 128, 8),
        ({"block_length": 64}, 256, 8),
        ({"block_length": 4}, 128, 32),
        ({"max_active_blocks": 2}, 64, 2),
        ({"canvas_length": 96}, 96, 8),
        ({"canvas_length": 96, "block_length": 4}, 96, 24),
        ({"max_active_blocks": 100}, 1024, 100),
        ({"block_length": 1024}, 1024, 8),
    ],
)
def test_canvas_of_d2f(options: dict[str, int], canvas: int, blocks: int) -> None:
    config = resolved(strategy="d2f", **options)
    assert (config.canvas_length, config.max_active_blocks) == (canvas, blocks)


def test_canvas_must_fit_the_context() -> None:
    with pytest.raises(
        ValueError, match="canvas_length 65 is longer than the context of 64"
    ):
        resolved(max_model_len=64, canvas_length=65)
    assert resolved(max_model_len=50, strategy="d2f").canvas_length == 50
    with pytest.raises(
        ValueError, match="block_length 32 is longer than the canvas of 16"
    ):
        resolved(canvas_length=16, strategy="d2f")
    with pytest.raises(
        ValueError, match="block_length 32 is longer than the canvas of 20"
    ):
        resolved(max_model_len=20, strategy="d2f")
    assert resolved(max_model_len=20).block_length == 20
    with pytest.raises(
        ValueError, match="block_length 64 is longer than the canvas of 20"
    ):
        resolved(max_model_len=20, block_length=64)


@pytest.mark.parametrize("policy", ["low_confidence", "factor", "random"])
def test_policies_without_meaning_for_d2f(policy: str) -> None:
    with pytest.raises(
        ValueError, match=f"policy '{policy}' has no meaning for strategy 'd2f'"
    ):
        resolved(strategy="d2f", policy=policy)
    message = request_refusal(resolved(strategy="d2f"), dllm_policy=policy)
    assert f"dllm_policy '{policy}' has no meaning" in message


def test_options_that_the_strategy_never_reads_are_refused() -> None:
    d2f = resolve(Options(strategy="d2f"), "LLaDAModelLM", 512, 300)
    block = resolve(Options(strategy="block_diffusion"), "LLaDAModelLM", 512, 300)
    several = Options(strategy="block_diffusion", max_active_blocks=2)
    taken = {"threshold": 0.5, "block_add_threshold": 0.5, "block_length": 8}
    check_options_read(d2f, taken)
    check_options_read(resolve(several, "LLaDAModelLM", 512, 300), taken)
    with pytest.raises(
        ValueError, match="block_add_threshold has no effect with max_active_bl"
    ):
        check_options_read(block, taken)
    for config, name in ((d2f, "steps"), (d2f, "factor"), (block, "num_to_transfer")):
        with pytest.raises(ValueError, match=f"{name} has no effect"):
            check_options_read(config, {name: 3})
    with pytest.raises(ValueError, match="eps has no effect"):
        check_options_read(block, {"eps": 0.5})


def test_steps_are_bounded() -> None:
    with pytest.raises(ValueError, match="steps must be at most 4096"):
        Options.from_user({"steps": 3_000_000_000})


@pytest.mark.parametrize("name", ["strategy", "canvas_length", "lora_path"])
def test_options_of_the_server_are_no_arguments(name: str) -> None:
    message = request_refusal(resolved(strategy="d2f"), **{f"dllm_{name}": 1})
    assert message.startswith(f"Request argument refused: dllm_{name} belongs to the")
    assert f"start the server with that {name}" in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("treshold", "threshold"),
        ("block_lenght", "block_length"),
        ("tempate", "template"),
    ],
)
def test_the_nearest_name(written: str, meant: str) -> None:
    message = request_refusal(resolved(), **{f"dllm_{written}": 1})
    assert message.endswith(f" (did you mean dllm_{meant}?).")
    if meant in FIELDS:
        assert refusal(**{written: 1}).endswith(f" (did you mean {meant}?).")
    assert "(did you mean dual_cache?)" in refusal(strategy="dualcache")


@pytest.mark.parametrize("name", ["mask_token_id", "x"])
def test_unknown_request_arguments(name: str) -> None:
    message = request_refusal(resolved(strategy="d2f"), **{f"dllm_{name}": 1})
    assert message.startswith(f"Unknown request argument 'dllm_{name}'")
    assert all(argument in message for argument in REQUEST_ARGUMENTS)
