"""Register our config hook and tokenizer mode with vLLM, once per process."""

from collections.abc import Iterable

from dllm_plugin.config.decode import TOKENIZER_MODE

# What vLLM makes of an architecture under `--model-impl transformers`.
TRANSFORMERS_BACKENDS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")


def register_config_hooks(architectures: Iterable[str]) -> None:
    """Enter our hook for each architecture into vLLM's map of model config hooks.

    With it go the converter that tells it which dtypes the user left open, and a refusal.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from dllm_plugin.engine.auto_dtype import register_convertors
    from dllm_plugin.engine.config_hook import DiffusionConfigHook, LeftToRightRefusal

    register_convertors()
    for architecture in architectures:
        MODELS_CONFIG_MAP[architecture] = DiffusionConfigHook
    for architecture in TRANSFORMERS_BACKENDS:
        MODELS_CONFIG_MAP[architecture] = LeftToRightRefusal


def register_tokenizer_mode() -> None:
    """Register our tokenizer mode: vLLM's HF tokenizer with our renderer. Idempotent."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    if TOKENIZER_MODE not in RENDERER_REGISTRY.renderers:
        RENDERER_REGISTRY.register(
            TOKENIZER_MODE, "dllm_plugin.engine.admission", "DiffusionRenderer"
        )
    if TOKENIZER_MODE not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
