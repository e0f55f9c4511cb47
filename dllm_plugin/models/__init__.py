"""Subclass vLLM's models; `checkpoints` reads what lies on disk."""

# Architecture name in config.json -> class: one for each parent and layout of weights.
ARCHITECTURES: dict[str, str] = {
    "LLaDAModelLM": "dllm_plugin.models.llada:LLaDAModelLM",
    "LLaDAForDiffusionLM": "dllm_plugin.models.llada:LLaDAModelLM",
    "LLaDAMoEModelLM": "dllm_plugin.models.sdar:SDARMoeForCausalLM",
    "DreamModel": "dllm_plugin.models.dream:DreamModel",
    "DreamForDiffusionLM": "dllm_plugin.models.dream:DreamModel",
    "SDARForCausalLM": "dllm_plugin.models.sdar:SDARForCausalLM",
    "WeDLMForCausalLM": "dllm_plugin.models.sdar:WeDLMForCausalLM",
    "WeDLMBiasedForCausalLM": "dllm_plugin.models.sdar:WeDLMBiasedForCausalLM",
    "IDLMForCausalLM": "dllm_plugin.models.sdar:IDLMForCausalLM",
    "SDARMoeForCausalLM": "dllm_plugin.models.sdar:SDARMoeForCausalLM",
    "RND1LM": "dllm_plugin.models.sdar:SDARMoeForCausalLM",
    "LLaDA2MoeModelLM": "dllm_plugin.models.llada2:LLaDA2MoeModelLM",
    "LLaDA22MoeModelLM": "dllm_plugin.models.llada2:LLaDA22MoeModelLM",
    "DreamForCausalLM": "dllm_plugin.models.dream:DreamReasoner",
    "OpenDCoderForDiffusionLM": "dllm_plugin.models.dream:DreamModel",
    "A2DQwen3LMHeadModel": "dllm_plugin.models.sdar:SDARForCausalLM",
    "A2DQwen2LMHeadModel": "dllm_plugin.models.dream:DreamModel",
    "A2DLlamaLMHeadModel": "dllm_plugin.models.stable_diffcoder:StableDiffCoder",
    "StableDiffcoderForCausalLM": "dllm_plugin.models.stable_diffcoder:StableDiffCoder",
    "NemotronLabsDiffusionModel": (
        "dllm_plugin.models.nemotron:NemotronLabsDiffusionModel"
    ),
    "Fast_dLLM_QwenForCausalLM": "dllm_plugin.models.fast_dllm:FastDLLMQwenForCausalLM",
}


def register_configs() -> None:
    """Register our config classes and their tokenizers with transformers; may be called again.

    Must run before any config or tokenizer of these models is loaded. Otherwise transformers asks
    on the terminal whether it may run the repository's own Python code.
    """
    from transformers import AutoConfig, AutoTokenizer

    from dllm_plugin.models.causal_configs import CAUSAL_CONFIGS
    from dllm_plugin.models.configs import CONFIGS
    from dllm_plugin.models.tokenization import TOKENIZERS

    for config in (*CONFIGS, *CAUSAL_CONFIGS):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for reader, tokenizer in TOKENIZERS.items():
        AutoTokenizer.register(reader, tokenizer_class=tokenizer, exist_ok=True)
