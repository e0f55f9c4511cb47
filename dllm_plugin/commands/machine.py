"""Name the machine and the versions that a measurement was taken with."""

import platform
import sys

import dllm_plugin


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
