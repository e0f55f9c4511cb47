"""Tokenizers without the repositories' own code."""

from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer

from dllm_plugin.models.configs import DreamConfig, FastDLLMConfig, SDARConfig, SDARMoeConfig


class DreamTokenizer(Qwen2Tokenizer):
    """Qwen2's byte-level BPE under the class name that Dream's tokenizer_config.json asks for.

    The repositories hold vocab.json and merges.txt only; the added tokens (`<|beginoftext|>`,
    `<|mask|>`) and which of them are special come from tokenizer_config.json.
    """


# What is not listed here names a class of transformers itself in tokenizer_config.json.
TOKENIZERS: dict[type[PreTrainedConfig], type[PreTrainedTokenizerBase]] = {
    DreamConfig: DreamTokenizer,
    SDARConfig: Qwen2Tokenizer,  # dense repositories bring code for it all the same
    SDARMoeConfig: Qwen2Tokenizer,
    FastDLLMConfig: Qwen2Tokenizer,
}
