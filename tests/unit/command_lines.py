"""Arguments of command lines on the tiny checkpoint, as vLLM gets them."""

import json
from pathlib import Path
from typing import Any

from dllm_plugin.commands import serve

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
TINY = str(CHECKPOINTS / "tiny-llada")
SDAR = str(CHECKPOINTS / "tiny-sdar")
WEDLM = str(CHECKPOINTS / "tiny-wedlm")
IDLM = str(CHECKPOINTS / "tiny-idlm")
NEMOTRON = str(CHECKPOINTS / "tiny-nemotron")
LLADA22 = str(CHECKPOINTS / "tiny-llada2.2")
# Wrong ones, which are refused before torch is imported.
LIGHT = f"""\
serve x --strategy d2f --threshold 3
generate x --strategy d2f --threshold 3
serve {SDAR} --policy origin
serve --policy origin
serve {SDAR} --full-refresh-every 8
serve --min-window 8
serve --strategy d2f --factor 2
serve --strategy d2f --adaptive balanced --min-window 40 --canvas-length 32
serve {SDAR} --canvas-length 3
serve {SDAR} --canvas-length 16 --max-active-blocks 8
serve {WEDLM} --threshold 0.5
serve {WEDLM} --block-length 4
serve {WEDLM} --adaptive balanced
serve {LLADA22} --adaptive balanced
serve {LLADA22} --policy factor
serve {LLADA22} --factor 2
serve {LLADA22} --block-length 16
serve {IDLM} --canvas-length 2
infill [MASK:2] --model {LLADA22}
serve --lora-path=
serve --tokenizer=
serve --strategy dual_cache --adaptive balanced
serve --canvas-length 5000
generate x --regex (
infill [MASK:5000]
verify --prompts /no/such/file
doctor --acceptance 5
doctor --requests 8 --acceptance x
eval --schedule x
eval --questions /etc
eval --schedule 5000
eval --schedule 8 --strategy dual_cache
eval --all --output /no/such/folder"""


def served(*arguments: str) -> list[str]:
    """What vLLM is given, on a port that is free."""
    return serve.server_arguments([*arguments, "--port", "0"])


def section_of(arguments: list[str]) -> dict[str, Any]:
    """Our options among the arguments of vLLM."""
    config = json.loads(arguments[arguments.index("--additional-config") + 1])
    return dict(config["dllm"])
