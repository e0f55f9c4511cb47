"""Describe this installation: commands of other packages, hardware and versions."""

import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import dllm_plugin

GROUP = "diffuplug.commands"


def load_command(name: str, words: str) -> Callable[[Any], int]:
    """Return the function of an entry point; `words` are what the user typed to get it.

    Raises ImportError if no installed distribution has the entry point.
    """
    for entry_point in metadata.entry_points(group=GROUP, name=name):
        function: Callable[[Any], int] = entry_point.load()
        return function
    raise ImportError(
        f"`{words}` is an entry point of the distribution diffuplug, which is not installed here: "
        "run `pip install` on it, a folder in PYTHONPATH is not enough"
    )


def processor() -> str:
    """Return the name of this machine's processor."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def installation() -> dict[str, str]:
    """Return hardware and versions, as JSON lines hold them."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    threads = f"{processor()}, {torch.get_num_threads()} threads"
    return {
        "hardware": threads
        if current_platform.is_cpu()
        else current_platform.get_device_name(),
        "diffuplug": dllm_plugin.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
