"""How long the blocks are that a checkpoint was trained on."""

import re
from typing import TYPE_CHECKING

from dllm_plugin.models import Family

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SUFFIX = re.compile(r"-b(\d+)$")  # JetLM/SDAR-8B-Chat-b32: repositories whose config is silent


def trained_block_length(model_config: "ModelConfig", family: Family) -> tuple[int | None, str]:
    """Positions of a block and where that was found; None where any length serves.

    Looked up in config.json, then the repository's name, then the family. Raises ValueError when
    config.json has no positive whole number.
    """
    from dllm_plugin.models.lora import model_names

    if family.block_length is None:
        return None, "any length"
    config = model_config.hf_config
    if family.block_key is not None:
        configured = getattr(config, family.block_key)
        if configured is not None:
            if type(configured) is not int or configured < 1:
                raise ValueError(
                    f"{family.block_key} in config.json must be a whole number of at least 1, got "
                    f"{configured!r}: correct config.json."
                )
            return configured, "config.json"
        served = (model_config.model, config.source_name or "")
        for name in sorted(set().union(*(model_names(text) for text in served if text))):
            found = SUFFIX.search(name)
            if found and int(found[1]):
                return int(found[1]), f"the model's name {name!r}"
    return family.block_length, f"default of {family.name}"
