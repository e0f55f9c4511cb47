"""Return hidden states, tensors of non-autoregressive models, and images (docs/omni.md).

Every vLLM process imports this module, so it imports no other module of this folder.
"""

from typing import Any, NamedTuple

import torch

# Key of SamplingParams.extra_args by which a request asks.
WANTED = "return_hidden_states"
# A tensor whose bytes start with it is a refusal with its reason.
REFUSED = b"\x00refused\x00"
Runner: Any = object  # base class of mixins for vLLM's model runners
# Entry of additional_config["omni"] -> whether a value is valid.
OPTIONS: dict[str, Any] = {
    "hidden_state_layers": lambda x: isinstance(x, list),
    "max_pixels": lambda x: type(x) is int and x > 0,
}


class HiddenStates(NamedTuple):
    """Store float32 ``[positions, hidden]``, or ``[positions, layers, hidden]`` for chosen layers.

    Row i belongs to position start + i of prompt plus completion. The last token was never an
    input and has no row. The first `start` positions came from the prefix cache and have none.
    """

    rows: Any
    start: int


def hidden_state_args(layers: list[int] | None = None) -> dict[str, Any]:
    """Return engine arguments for hidden states: ``LLM(model, **hidden_state_args())``.

    Args:
        layers: as in transformers' ``output_hidden_states``: 0 is the embedding, k the output
            of layer k, and the last layer includes the final norm. None: only the last layer.
    """
    engine: dict[str, Any] = {
        "worker_cls": "dllm_plugin.omni.workers.ARWorker",
        "scheduler_cls": "dllm_plugin.omni.scheduler.HiddenStatesScheduler",
        "logits_processors": ["dllm_plugin.omni.scheduler:HiddenStatesRules"],
    }
    if layers is not None:
        engine["additional_config"] = {"omni": {"hidden_state_layers": layers}}
    return engine


def hidden_state_params(**sampling: Any) -> Any:
    """Return SamplingParams that ask for hidden states and do not read the prefix cache."""
    from vllm import SamplingParams

    sampling["extra_args"] = {**(sampling.get("extra_args") or {}), WANTED: True}
    return SamplingParams(**{"skip_reading_prefix_cache": True, **sampling})


def hidden_states_of(output: Any, index: int = 0) -> HiddenStates | None:
    """Return the hidden states of completion `index` of a finished RequestOutput, or None.

    They arrive as `routed_experts`, vLLM's field for arrays by position. Raises ValueError if
    the prompt was given as embeddings.
    """
    completion = output.outputs[index]
    if completion.routed_experts is None:
        return None
    if output.prompt_token_ids is None:
        raise ValueError(
            "Hidden states of prompt_embeds have no positions; use prompt_token_ids."
        )
    computed = len(output.prompt_token_ids) + len(completion.token_ids) - 1
    return HiddenStates(
        completion.routed_experts, computed - len(completion.routed_experts)
    )


def tensor_args() -> dict[str, Any]:
    """Return engine arguments for a :class:`dllm_plugin.omni.diffusion.NonARModel`."""
    return {
        "runner": "pooling",
        "worker_cls": "dllm_plugin.omni.workers.DiffusionWorker",
    }


def tensor_of(output: Any, error: type[Exception] = ValueError, entry: str = "") -> Any:
    """Return the tensor of a PoolingRequestOutput, or raise `error` with `entry` and the reason."""
    tensor = output.outputs.data
    if tensor.dtype == torch.uint8:
        start = tensor.flatten()[:1024].numpy().tobytes()
        if start.startswith(REFUSED):
            reason = start.removeprefix(REFUSED).decode(errors="replace")
            raise error(entry + reason)
    return tensor


def pipeline_args(max_num_seqs: int = 4) -> dict[str, Any]:
    """Return engine arguments for a pipeline that denoises `max_num_seqs` requests in turns."""
    return {
        "config_format": "diffusers",
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "max_num_seqs": max_num_seqs,
        "distributed_executor_backend": "dllm_plugin.omni.pipeline.DiffusersPipelineExecutor",
        "scheduler_cls": "dllm_plugin.omni.scheduler.PipelineScheduler",
    }


def option(config: Any, name: str, default: Any = None) -> Any:
    """Return an entry of ``additional_config["omni"]``. Raises ValueError if any entry is wrong."""
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
    """Raise ValueError for an engine with our worker or executor but another scheduler."""
    found = config.scheduler_config.get_scheduler_cls()
    name = f"{found.__module__}.{found.__qualname__}"
    refuse(subject, {f"scheduler_cls={name!r}; use {wanted!r}": name != wanted})


def refusal(sentence: str) -> Any:
    """Encode a request's refusal as its tensor, uint8 ``[bytes]``: nothing else is sent back."""
    return torch.frombuffer(bytearray(REFUSED + sentence.encode()), dtype=torch.uint8)
