"""Runners for more than text tokens, see docs/omni.md: hidden states beside generated tokens,
tensors from non-autoregressive models, images from diffusers pipelines. Every vLLM process imports
this file, so what only one of them needs is imported there."""

from typing import Any, NamedTuple

import torch

WANTED = "return_hidden_states"  # the request's switch, a key of SamplingParams.extra_args
REFUSED = b"\x00refused\x00"  # a result of bytes that starts so is a refusal, and says why
Runner: Any = object  # base of what stands in front of whichever runner of vLLM
OPTIONS: dict[str, Any] = {  # entries of additional_config["omni"], and whether a value fits
    "hidden_state_layers": lambda x: isinstance(x, list),
    "max_pixels": lambda x: type(x) is int and x > 0,
}


class HiddenStates(NamedTuple):
    """Float32 array ``[positions, hidden]``, or ``[positions, layers, hidden]`` if layers were
    chosen. Row i belongs to position start + i of prompt plus completion, whose last token was
    never an input; the `start` positions before were not computed (read from the prefix cache)."""

    rows: Any
    start: int


def hidden_state_args(layers: list[int] | None = None) -> dict[str, Any]:
    """Engine arguments for hidden states: ``LLM(model, **hidden_state_args())``. `layers` as in
    transformers' ``output_hidden_states``: 0 is the embedding, k the output of layer k, and the
    last one follows the final norm (``None`` returns it alone)."""
    engine: dict[str, Any] = {
        "worker_cls": "dllm_plugin.omni.workers.ARWorker",
        "scheduler_cls": "dllm_plugin.omni.scheduler.HiddenStatesScheduler",
        "logits_processors": ["dllm_plugin.omni.scheduler:HiddenStatesRules"],
    }
    if layers is not None:
        engine["additional_config"] = {"omni": {"hidden_state_layers": layers}}
    return engine


def hidden_state_params(**sampling: Any) -> Any:
    """SamplingParams that ask for hidden states, of positions in the prefix cache as well."""
    from vllm import SamplingParams

    sampling["extra_args"] = {**(sampling.get("extra_args") or {}), WANTED: True}
    return SamplingParams(**{"skip_reading_prefix_cache": True, **sampling})


def hidden_states_of(output: Any, index: int = 0) -> HiddenStates | None:
    """Of completion `index` of a finished RequestOutput, or None; they travel as routed_experts,
    vLLM's channel for arrays by position. Raises ValueError if the prompt was not of tokens."""
    completion = output.outputs[index]
    if completion.routed_experts is None:
        return None
    if output.prompt_token_ids is None:
        raise ValueError("Hidden states of prompt_embeds have no positions; use prompt_token_ids.")
    computed = len(output.prompt_token_ids) + len(completion.token_ids) - 1
    return HiddenStates(completion.routed_experts, computed - len(completion.routed_experts))


def tensor_args() -> dict[str, Any]:
    """Engine arguments for a :class:`dllm_plugin.omni.diffusion.NonARModel`."""
    return {"runner": "pooling", "worker_cls": "dllm_plugin.omni.workers.DiffusionWorker"}


def tensor_of(output: Any, error: type[Exception] = ValueError, entry: str = "") -> Any:
    """The tensor of a PoolingRequestOutput; raises `error` if the request (`entry`) was refused."""
    tensor = output.outputs.data
    start = tensor.flatten()[:1024].numpy().tobytes() if tensor.dtype == torch.uint8 else b""
    if start.startswith(REFUSED):
        raise error(entry + start.removeprefix(REFUSED).decode(errors="replace"))
    return tensor


def pipeline_args(max_num_seqs: int = 4) -> dict[str, Any]:
    """Engine arguments for a diffusers pipeline; so many requests take turns, others wait."""
    return {
        "config_format": "diffusers",
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "max_num_seqs": max_num_seqs,
        "distributed_executor_backend": "dllm_plugin.omni.pipeline.DiffusersPipelineExecutor",
        "scheduler_cls": "dllm_plugin.omni.scheduler.PipelineScheduler",
    }


def option(config: Any, name: str, default: Any = None) -> Any:
    """An entry of vLLM's ``additional_config["omni"]``. Raises ValueError if any is wrong."""
    given = config.additional_config
    chosen = given.get("omni", {}) if isinstance(given, dict) else {}
    fits = isinstance(chosen, dict) and set(chosen) <= set(OPTIONS)
    if not fits or not all(OPTIONS[key](value) for key, value in chosen.items()):
        known = "only hidden_state_layers (a list) and max_pixels (a positive integer)"
        raise ValueError(f"additional_config['omni'] may have {known}, got {chosen!r}.")
    return chosen.get(name, default)


def refuse(subject: str, faults: dict[str, Any]) -> None:
    """Raise ValueError with one sentence for the first fault that is present."""
    for fault, present in faults.items():
        if present:
            raise ValueError(f"{subject} cannot be combined with {fault}.")


def check_scheduler(subject: str, config: Any, wanted: str) -> None:
    """Refuse an engine that has our worker or executor, but not the scheduler of it."""
    found = config.scheduler_config.get_scheduler_cls()
    name = f"{found.__module__}.{found.__qualname__}"
    refuse(subject, {f"scheduler_cls={name!r}; use {wanted!r}": name != wanted})


def refusal(sentence: str) -> Any:
    """A request's refusal on its only way back, as its tensor: uint8 ``[bytes]``."""
    return torch.frombuffer(bytearray(REFUSED + sentence.encode()), dtype=torch.uint8)
