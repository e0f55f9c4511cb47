"""What the offline commands share: engine options, starting the engine, reading its results."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from dllm_plugin import default_model
from dllm_plugin.config import DecodeConfig

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

# A model of a few megabytes should not claim the memory that vLLM takes by default.
DEFAULT_KV_CACHE_BYTES = 1 << 30


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` from the model and decode options of a command.

    The bundled model brings its adapter unless the strategy asked for has no use for one.
    Raises ValueError for a wrong decode option, before anything heavy is imported.
    """
    names = ("strategy", "policy", "threshold", "block_length", "lora_path")
    dllm = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    DecodeConfig.from_user(dllm)
    dtype = {"dtype": args.dtype} if hasattr(args, "dtype") else {}
    if args.model is not None:
        return {"model": args.model, "additional_config": {"dllm": dllm}, **dtype}
    if args.strategy in (None, "auto", "d2f"):
        dllm.setdefault("lora_path", default_model.adapter_path())
    return bundled_options(dllm) | dtype


def bundled_options(dllm: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for the bundled model, for which nothing is ever fetched."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return {
        "model": default_model.path(),
        "kv_cache_memory_bytes": DEFAULT_KV_CACHE_BYTES,
        "additional_config": {"dllm": dllm},
    }


def start_engine(options: dict[str, Any]) -> "LLM":
    """An engine, or ValueError when it does not come up."""
    from vllm import LLM

    try:
        return LLM(**options)
    except RuntimeError as error:
        # vLLM has printed the cause from the process where it happened.
        raise ValueError(f"the engine did not start ({error}); the cause is above") from error


def conversation(question: str) -> "list[ChatCompletionMessageParam]":
    """One user turn."""
    return [{"role": "user", "content": question}]


def num_forwards(output: "RequestOutput") -> int:
    """Denoising forwards of a finished request: the histogram has one entry for each."""
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics is not None, "the scheduler fills it for every request"
    return sum(metrics.histogram)


def one_sentence(error: Exception) -> str:
    """The message of an error; of a failed validation only what was wrong, not the dump."""
    problems = getattr(error, "errors", None)
    if callable(problems):
        return str(problems()[0]["msg"]).removeprefix("Value error, ")
    return " ".join(str(error).split())
