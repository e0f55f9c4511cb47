"""Subclass vLLM's models; `checkpoints` reads what lies on disk."""

# Architecture name in config.json -> class: one for each parent and layout of weights.
ARCHITECTURES: dict[str, str] = {
    "LLaDAModelLM": "dllm_plugin.models.llada:LLaDAModelLM",
    "LLaDAForDiffusionLM": "dllm_plugin.models.llada:LLaDAModelLM",
    "LLaDAMoEModelLM": "dllm_plugin.models.qwen:Qwen3MoeDiffusion",
    "DreamModel": "dllm_plugin.models.qwen:Qwen2Diffusion",
    "DreamForDiffusionLM": "dllm_plugin.models.qwen:Qwen2Diffusion",
    "SDARForCausalLM": "dllm_plugin.models.qwen:Qwen3Diffusion",
    "WeDLMForCausalLM": "dllm_plugin.models.qwen:Qwen3Diffusion",
    "WeDLMBiasedForCausalLM": "dllm_plugin.models.qwen:BiasedLlamaDiffusion",
    "IDLMForCausalLM": "dllm_plugin.models.qwen:Qwen3Diffusion",
    "SDARMoeForCausalLM": "dllm_plugin.models.qwen:Qwen3MoeDiffusion",
    "RND1LM": "dllm_plugin.models.qwen:Qwen3MoeDiffusion",
    "LLaDA2MoeModelLM": "dllm_plugin.models.llada2:LLaDA2MoeModelLM",
    "LLaDA22MoeModelLM": "dllm_plugin.models.llada2:LLaDA22MoeModelLM",
    "DreamForCausalLM": "dllm_plugin.models.qwen:Qwen3Diffusion",
    "OpenDCoderForDiffusionLM": "dllm_plugin.models.qwen:Qwen2Diffusion",
    "A2DQwen3LMHeadModel": "dllm_plugin.models.qwen:Qwen3Diffusion",
    "A2DQwen2LMHeadModel": "dllm_plugin.models.qwen:Qwen2Diffusion",
    "A2DLlamaLMHeadModel": "dllm_plugin.models.qwen:LlamaDiffusion",
    "StableDiffcoderForCausalLM": "dllm_plugin.models.qwen:LlamaDiffusion",
    "NemotronLabsDiffusionModel": (
        "dllm_plugin.models.nemotron:NemotronLabsDiffusionModel"
    ),
    "Fast_dLLM_QwenForCausalLM": "dllm_plugin.models.qwen:Qwen2Diffusion",
}


def register_configs() -> None:
    """Register our config classes and their tokenizers with transformers; may be called again.

    Must run before any config or tokenizer of these models is loaded. Otherwise transformers asks
    on the terminal whether it may run the repository's own Python code.
    """
    from transformers import AutoConfig, AutoTokenizer

    from dllm_plugin.models.configs import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        if config.tokenizer is not None:
            AutoTokenizer.register(
                config, tokenizer_class=config.tokenizer, exist_ok=True
            )
