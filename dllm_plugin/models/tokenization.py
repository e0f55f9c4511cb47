"""Dream's tokenizer without the repository's own code."""

from transformers import Qwen2Tokenizer


class DreamTokenizer(Qwen2Tokenizer):
    """Qwen2's byte-level BPE under the class name that Dream's tokenizer_config.json asks for.

    The repositories hold vocab.json and merges.txt only; the added tokens (`<|beginoftext|>`,
    `<|mask|>`) and which of them are special come from tokenizer_config.json.
    """
