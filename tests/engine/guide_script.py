"""Decode with the package that PYTHONPATH names. Run by ``test_guides.py``; wishes as offline."""

import json
import sys
from importlib import import_module
from pathlib import Path

from offline_script import tokens_of


def register_class(model: str) -> None:
    """Register a checkpoint's class, for vLLM inspects a name in a new process: ten seconds."""
    from vllm import ModelRegistry

    from dllm_plugin.models import ARCHITECTURES

    [architecture] = json.loads(Path(model, "config.json").read_text())["architectures"]
    module, _, name = ARCHITECTURES[architecture].partition(":")
    ModelRegistry.register_model(architecture, getattr(import_module(module), name))


if __name__ == "__main__":
    wishes = json.loads(sys.argv[1])
    for model in {wish["engine"]["model"] for wish in wishes}:
        register_class(model)
    tokens = [tokens_of(wish) for wish in wishes]
    loaded = [
        m for m in list(sys.modules.values()) if m.__name__.startswith("dllm_plugin")
    ]
    files = sorted({str(m.__file__) for m in loaded})
    Path(sys.argv[2]).write_text(json.dumps({"files": files, "tokens": tokens}))
