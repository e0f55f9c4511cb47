"""Read from a checkpoint's config or name its trained block length and edits."""

import re
from typing import TYPE_CHECKING

from dllm_plugin.decoding.families import Family

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SUFFIX = re.compile(
    r"-b(\d+)$"
)  # as in JetLM/SDAR-8B-Chat-b32, whose config has no block length


def trained_to_edit(model_config: "ModelConfig", family: Family) -> bool:
    """Return whether model type or name shows that the model was trained to replace tokens."""
    if family.edits_pattern is None:
        return False
    config = model_config.hf_config
    names = (config.model_type, *_names(model_config))
    return any(re.search(family.edits_pattern, name) for name in names)


def _names(model_config: "ModelConfig") -> list[str]:
    from dllm_plugin.models.checkpoints.lora import model_names

    served = (model_config.model, model_config.hf_config.source_name or "")
    return sorted(set().union(*(model_names(text) for text in served if text)))


def trained_block_length(
    model_config: "ModelConfig", family: Family
) -> tuple[int | None, str]:
    """Return the block length and where it was found; None if any length will do.

    Looks in config.json, then in the repository's name, then takes the family's default. Raises
    ValueError if config.json has anything but a positive whole number.
    """
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
        for name in _names(model_config):
            found = SUFFIX.search(name)
            if found and int(found[1]):
                return int(found[1]), f"the model's name {name!r}"
    return family.block_length, f"default of {family.name}"
