"""What the offline commands share: engine options, starting the engine, reading its results."""

import argparse
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from dllm_plugin import default_model
from dllm_plugin.config.options import Options

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

# A model of a few megabytes should not claim the memory that vLLM takes by default, and on a CPU
# vLLM does not even start unless the share it may use is free.
BUNDLED_MEMORY = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``vllm.LLM`` from the model and decode options of a command.

    The bundled model brings its adapter unless the strategy asked for has no use for one.
    Raises ValueError for a wrong decode option, before anything heavy is imported.
    """
    names = ("strategy", "policy", "threshold", "block_length", "lora_path", "kv_cache_layout")
    dllm = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    Options.from_user(dllm)
    engine_names = ("dtype", "gpu_memory_utilization")
    engine = {name: getattr(args, name, None) for name in engine_names}
    engine = {name: value for name, value in engine.items() if value is not None}
    if args.model is not None:
        if args.model.startswith(("/", ".", "~")) and not os.path.isdir(args.model):
            raise ValueError(f"there is no folder {args.model}")
        return {"model": args.model, "additional_config": {"dllm": dllm}, **engine}
    if args.strategy in (None, "auto", "d2f"):
        dllm.setdefault("lora_path", default_model.adapter_path())
    return bundled_options(dllm) | engine


def bundled_options(dllm: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for the bundled model, for which nothing is ever fetched."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return {
        "model": default_model.path(),
        "additional_config": {"dllm": dllm},
        **BUNDLED_MEMORY,
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


def processor() -> str:
    """What this machine's processor is called."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def one_sentence(error: Exception) -> str:
    """The message of an error; of a failed validation what was wrong and where, not the dump."""
    problems = getattr(error, "errors", None)
    first: dict[str, Any] = problems()[0] if callable(problems) else {"msg": error}
    text, where = str(first["msg"]), ".".join(map(str, first.get("loc", ())))
    # Checks of vLLM's or ours, unlike those of types, name what they are about.
    checked = text.removeprefix("Value error, ")
    return " ".join((checked if checked != text or not where else f"{where}: {text}").split())
