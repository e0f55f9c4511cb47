"""Recorded decodes of tiny checkpoints, each with the rules of its plain loop."""

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

GOLDENS = Path(__file__).parents[1] / "goldens"
# Checkpoints of which the authors' tokenizers were recorded, too.
WITH_TOKENIZERS = (
    *(
        "tiny-llada",
        "tiny-dream",
        "tiny-sdar",
        "tiny-sdar-moe",
        "tiny-llada2.0",
        "tiny-llada2.1",
        "tiny-llada-moe",
        "tiny-rnd1",
    ),
    *("tiny-fast-dllm-v2", "tiny-fast-dllm-v2-tied", "tiny-stable-diffcoder"),
    "tiny-a2d-qwen3",
)


class Case(NamedTuple):
    """A prompt, the rules of its loop, and the recorded answer and forwards."""

    model: PlainModel
    prompt: list[int]
    rules: Rules
    answer: list[int]
    forwards: list[dict[str, Any]] | None
    stop: set[int]
    max_tokens: int | None = None


@cache
def model_of(name: str) -> PlainModel:
    return PlainModel.load(GOLDENS / "checkpoints" / f"tiny-{name}")


D2F_POLICIES = {
    "default": "threshold",
    "neg_entropy": "entropy",
    "margin_confidence": "topk_margin",
}


def d2f(trace: str, record: dict[str, Any]) -> Case:
    settings, eos = record["settings"], record["eos_id"]
    rules = Rules(
        "d2f",
        D2F_POLICIES[settings.get("sampling_strategy", "default")],
        settings["block_size"],
        threshold=settings["skip_threshold"],
        block_add_threshold=settings["block_add_threshold"],
        decoded_token_threshold=settings["decoded_token_threshold"],
    )
    answer = list(record["output_ids"])
    if eos in answer:
        answer = answer[: answer.index(eos) + 1]
    model = model_of(trace.removeprefix("d2f_"))
    return Case(model, record["prompt_ids"], rules, answer, None, {eos})


ON_GRID = {
    "sdar_static": ("sdar", "low_confidence"),
    "sdar_dynamic": ("sdar", "threshold"),
    "llada2_threshold": ("llada2.0", "threshold"),
    "llada21_joint": ("llada2.1", "joint_threshold"),
    "fast_dllm": ("fast-dllm-v2", "threshold"),
}


def on_grid(trace: str, record: dict[str, Any]) -> Case:
    settings, (model, policy) = record["settings"], ON_GRID[trace]
    names = ("editing_threshold", "max_post_steps", "num_to_transfer")
    given = {name: settings[name] for name in names if name in settings}
    rules = Rules(
        "sub_blocks" if trace == "fast_dllm" else "block_diffusion",
        policy,
        settings.get("block_length") or settings["block_size"],
        canvas_length=64,
        on_grid=True,
        threshold=settings.get("threshold", settings.get("confidence_threshold", 0.9)),
        steps=settings.get("denoising_steps") or settings.get("steps"),
        sub_block_length=settings.get("small_block_size"),
        **given,
    )
    stop = {settings.get("eos_id", settings.get("stop_token", -1))}
    prompt, answer = record["prompt_ids"], record["output_ids"]
    return Case(model_of(model), prompt, rules, answer, None, stop)


EXACT = {
    "stable_diffcoder_quota": "low_confidence",
    "stable_diffcoder_threshold": "threshold",
}


def exact(trace: str, record: dict[str, Any]) -> Case:
    settings, size = record["settings"], record["settings"]["block_length"]
    blocks = settings["gen_length"] // size
    rules = Rules(
        "exact_blocks",
        EXACT[trace],
        size,
        canvas_length=64,
        on_grid=True,
        exact_end=True,
        threshold=settings["threshold"] or 0.9,
        steps=settings["steps"] // blocks,
    )
    model = model_of("stable-diffcoder")
    prompt, answer = record["prompt_ids"], record["output_ids"]
    return Case(model, prompt, rules, answer, None, set())


ROUNDED = {"a2d_mdlm": "semi_autoregressive", "a2d_bd3lm": "exact_blocks"}


def rounded(trace: str, record: dict[str, Any]) -> Case:
    settings, count = record["settings"], record["settings"]["max_new_tokens"]
    size, by_blocks = settings["block_size"], trace == "a2d_bd3lm"
    steps = math.ceil(settings["steps"] / math.ceil(count / size))
    rules = Rules(
        ROUNDED[trace],
        "low_confidence",
        size,
        canvas_length=256,
        exact_end=True,
        rounded=True,
        splits_prompt=by_blocks,
        steps=settings.get("steps_per_block") or steps,
    )
    prompt, answer = record["prompt_ids"], record["output_ids"]
    forwards = None if by_blocks else record["forwards"]
    return Case(model_of("a2d-qwen3"), prompt, rules, answer, forwards, set())


FULL = {
    "llada_vanilla": "semi_autoregressive",
    "llada_fast_nocache": "semi_autoregressive",
    "llada_prefix_cache": "prefix_cache",
    "llada_dual_cache": "dual_cache",
    "llada_dual_cache_factor": "dual_cache",
    "dream_maskgit_plus": "semi_autoregressive",
    "dream_threshold_nocache": "semi_autoregressive",
    "dream_dual_cache_entropy": "dual_cache",
}
ALGORITHMS = {"entropy": "entropy", "confidence_threshold": "threshold"}


def full_attention(trace: str, record: dict[str, Any]) -> Case:
    settings, answer = record["settings"], record["output_ids"]
    policy = ALGORITHMS.get(settings.get("alg"), "low_confidence")
    size = settings.get("block_length", len(answer))
    for name in ("threshold", "factor"):
        policy = name if name in settings else policy
    names = ("threshold", "factor", "eps", "top_p", "top_k")
    given = {name: settings[name] for name in names if name in settings}
    steps = settings["steps"] * size // len(answer)
    rules = Rules(FULL[trace], policy, size, 64, steps=steps, **given)
    model = model_of(trace.partition("_")[0])
    return Case(model, record["prompt_ids"], rules, answer, record["forwards"], set())


def introspective(trace: str, record: dict[str, Any]) -> Case:
    settings, answer = record["settings"], record["output_ids"]
    rules = Rules("introspective", "sequential", settings["gen_block_size"])
    forwards = [one for one in record["forwards"] if one["kind"] != "prefill"]
    stop, length = {settings["eos_token_id"]}, settings["max_new_tokens"]
    model, prompt = model_of("idlm"), record["prompt_ids"]
    return Case(model, prompt, rules, answer, forwards, stop, length)


WINDOWS = {"wedlm_window": "wedlm", "wedlm_qwen2_window": "wedlm-qwen2"}


def window(trace: str, record: dict[str, Any]) -> Case:
    settings, answer = record["settings"], record["output_ids"]
    rules = Rules(
        "causal_window",
        "entropy",
        window=settings["window_size"],
        entropy_threshold=settings["entropy_threshold"] or 0.0,
        position_penalty=settings["pos_penalty_factor"],
    )
    forwards = [one for one in record["forwards"] if one["kind"] != "prefill"]
    stop, length = set(settings["stop_token_ids"]), settings["max_tokens"]
    model, prompt = model_of(WINDOWS[trace]), record["prompt_ids"]
    return Case(model, prompt, rules, answer, forwards, stop, length)


NEMOTRON = {
    "nemotron_generate": "causal_blocks",
    "nemotron_linear_spec": "self_speculation",
    "nemotron_ar": "self_speculation",
}


def nemotron(trace: str, record: dict[str, Any]) -> Case:
    settings, count = record["settings"], record["settings"]["max_new_tokens"]
    loop, threshold = NEMOTRON[trace], settings.get("threshold")
    by_quota = loop == "causal_blocks" and threshold is None
    rules = Rules(
        loop,
        "low_confidence" if by_quota else "threshold",
        settings.get("block_length", 1),
        threshold=threshold or 0.0,
        max_thinking_tokens=settings.get("max_thinking_tokens"),
        end_think_token_id=settings.get("end_think_token_id"),
    )
    prompt, answer = record["prompt_ids"], record["output_ids"][:count]
    stop = {settings.get("eos_token_id", 11)}
    forwards = record["forwards"][1:]
    return Case(model_of("nemotron"), prompt, rules, answer, forwards, stop, count)


def decides_as_recorded(text: Text, case: Case) -> bool:
    """Whether each forward decides what the authors' does.

    The recorded loop goes on after the token that ends the text, and records a token that ends
    thinking a forward earlier.
    """
    given = case.rules.end_think_token_id
    for mine, recorded in zip(text.forwards, case.forwards or (), strict=False):
        for pair in recorded["new"]:
            if pair[1] != given and pair not in mine.new:
                return False
    return True


def structure(trace: str, record: dict[str, Any]) -> Case:
    settings, answer = record["settings"], record["output_ids"]
    names = ("threshold", "editing_threshold", "max_post_steps", "steps")
    rules = Rules(
        "structure",
        "joint_threshold",
        settings["block_length"],
        on_grid=True,
        structure=(300, 301),
        **{name: settings[name] for name in names},
    )
    prompt, stop = record["prompt_ids"], set(settings["eos_ids"])
    return Case(model_of("llada2.2"), prompt, rules, answer, None, stop)
