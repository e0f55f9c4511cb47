"""Read from a checkpoint its trained block length, edits, mask token and turn ends."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dllm_plugin.decoding.families import Family

if TYPE_CHECKING:
    from vllm.config import ModelConfig


# As in JetLM/SDAR-8B-Chat-b32, whose config has no block length.
SUFFIX = re.compile(r"-b(\d+)$")
# Of a block length that neither config.json nor a known name gives.
UNKNOWN = "unknown"


def trained_to_edit(model_config: "ModelConfig", family: Family) -> bool:
    """Return whether model type or name shows that the model was trained to replace tokens."""
    if family.edits_pattern is None:
        return False
    config = model_config.hf_config
    names = (config.model_type, *checkpoint_names(model_config))
    return any(re.search(family.edits_pattern, name) for name in names)


def model_names(name: str | Path) -> set[str]:
    """Return the names by which a path or repository id is known: basename, Hub cache entry."""
    parts = Path(str(name).rstrip("/")).parts
    names = {*parts[-1:]}
    for part in parts:
        if part.startswith("models--"):
            names.add(part.split("--")[-1])
    return {name.casefold() for name in names}


def checkpoint_names(model_config: "ModelConfig") -> list[str]:
    """Return the names of a served checkpoint: where it lies, and as its author saved it."""
    names = model_names(model_config.model)
    source = model_config.hf_config.source_name
    return sorted(names | model_names(source)) if source else sorted(names)


def published_threshold(model_config: "ModelConfig", family: Family) -> float:
    """Return the threshold that a checkpoint's card asks for, else the family's."""
    names = checkpoint_names(model_config)
    for pattern, threshold in family.thresholds:
        if any(re.search(pattern, name) for name in names):
            return threshold
    return family.threshold


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
        names = checkpoint_names(model_config)
        for name in names:
            found = SUFFIX.search(name)
            if found and int(found[1]):
                return int(found[1]), f"the model's name {name!r}"
        if not any(re.search(family.names, name) for name in names):
            return family.block_length, UNKNOWN
    return family.block_length, f"default of {family.name}"


def tokenizer_ids(model_config: "ModelConfig") -> dict[str, int]:
    """Return the ids of a model's tokenizer by their texts; nothing without a tokenizer."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    return {} if tokenizer is None else tokenizer.get_vocab()


def find_mask_token(model_config: "ModelConfig", family: Family) -> tuple[int, str]:
    """Return the id of the mask token and where it was found.

    Looks in the HF config, then for the family's mask token texts in the tokenizer. Raises
    ValueError if neither has it.
    """
    configured = getattr(model_config.hf_config, "mask_token_id", None)
    if configured is not None:
        if type(configured) is not int:
            raise ValueError(
                f"mask_token_id {configured!r} in config.json is no whole number: correct "
                "config.json."
            )
        vocab_size = model_config.get_vocab_size()
        if not 0 <= configured < vocab_size:
            raise ValueError(
                f"mask_token_id {configured} in config.json lies outside the vocabulary of "
                f"{vocab_size} tokens: correct config.json."
            )
        return configured, "config.json"
    vocabulary = tokenizer_ids(model_config)
    for text in family.mask_tokens:
        if text in vocabulary:
            return int(vocabulary[text]), f"tokenizer token {text!r}"
    elsewhere = f"tokenizers of {family.title} do not say which it is"
    if family.mask_tokens:
        elsewhere = f"the tokenizer has none of {', '.join(family.mask_tokens)}"
    raise ValueError(
        f"No mask token: config.json has no mask_token_id and {elsewhere}; add mask_token_id to "
        "config.json or pass hf_overrides={'mask_token_id': ...}."
    )


def find_pad_token(model_config: "ModelConfig") -> int | None:
    """Return the id of the pad token; None if neither tokenizer nor config.json has a pad token."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    found = None if tokenizer is None else tokenizer.pad_token_id
    return model_config.hf_config.pad_token_id if found is None else int(found)


def find_turn_ends(model_config: "ModelConfig", family: Family) -> tuple[int, ...]:
    """Return the ids of the family's end-of-turn tokens, which end an answer like EOS."""
    ids = tokenizer_ids(model_config)
    return tuple(ids[text] for text in family.turn_end_tokens if text in ids)


def pad_and_eos(model_config: "ModelConfig") -> tuple[int, ...]:
    """Return the pad and the first EOS token of config.json; nothing if one is not there."""
    config = model_config.hf_config
    eos = config.eos_token_id
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    found = (config.pad_token_id, eos)
    return () if None in found else found
