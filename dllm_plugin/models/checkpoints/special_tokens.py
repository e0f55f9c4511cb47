"""Find a checkpoint's mask token and the tokens that end a turn."""

from typing import TYPE_CHECKING

from dllm_plugin.decoding.families import Family

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def find_mask_token(model_config: "ModelConfig", family: Family) -> tuple[int, str]:
    """Return the id of the mask token and where it was found.

    Looks in the HF config, then for the family's mask token texts in the tokenizer. Raises
    ValueError if neither has it.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    configured = getattr(model_config.hf_config, "mask_token_id", None)
    if configured is not None:
        vocab_size = model_config.get_vocab_size()
        if not 0 <= configured < vocab_size:
            raise ValueError(
                f"mask_token_id {configured} in config.json lies outside the vocabulary of "
                f"{vocab_size} tokens: correct config.json."
            )
        return int(configured), "config.json"
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        for text in family.mask_tokens:
            if text in vocabulary:
                return int(vocabulary[text]), f"tokenizer token {text!r}"
    raise ValueError(
        "No mask token: config.json has no mask_token_id and the tokenizer has none of "
        f"{', '.join(family.mask_tokens)}; add mask_token_id to config.json or pass "
        "hf_overrides={'mask_token_id': ...}."
    )


def find_turn_ends(model_config: "ModelConfig", family: Family) -> tuple[int, ...]:
    """Return the ids of the family's end-of-turn tokens, which end an answer like EOS."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return ()
    vocabulary = tokenizer.get_vocab()
    return tuple(
        vocabulary[text] for text in family.turn_end_tokens if text in vocabulary
    )
