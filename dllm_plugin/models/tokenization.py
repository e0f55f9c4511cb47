"""Choose tokenizer classes that need no Python code from the repositories."""

from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Qwen2Tokenizer

from dllm_plugin.models.causal_configs import WeDLMConfig
from dllm_plugin.models.configs import (
    DreamConfig,
    FastDLLMConfig,
    RND1Config,
    SDARConfig,
    SDARMoeConfig,
)


class DreamTokenizer(Qwen2Tokenizer):
    """Provide Qwen2's byte-level BPE under the class name in Dream's tokenizer_config.json.

    The repositories have only vocab.json and merges.txt. The added tokens (`<|beginoftext|>`,
    `<|mask|>`), and which of them are special, come from tokenizer_config.json.
    """


# For all other configs, tokenizer_config.json names a class of transformers.
TOKENIZERS: dict[type[PreTrainedConfig], type[PreTrainedTokenizerBase]] = {
    DreamConfig: DreamTokenizer,
    SDARConfig: Qwen2Tokenizer,  # these repositories ship Python code, which we do not need
    SDARMoeConfig: Qwen2Tokenizer,
    WeDLMConfig: Qwen2Tokenizer,
    RND1Config: Qwen2Tokenizer,
    FastDLLMConfig: Qwen2Tokenizer,
}
