"""Arguments of command lines on the tiny checkpoint, as vLLM gets them."""

import json
from pathlib import Path
from typing import Any

from dllm_plugin.commands import serve

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
TINY = str(CHECKPOINTS / "tiny-llada")


def served(*arguments: str) -> list[str]:
    """What vLLM is given, on a port that is free."""
    return serve.server_arguments([*arguments, "--port", "0"])


def section_of(arguments: list[str]) -> dict[str, Any]:
    """Our options among the arguments of vLLM."""
    config = json.loads(arguments[arguments.index("--additional-config") + 1])
    return dict(config["dllm"])
