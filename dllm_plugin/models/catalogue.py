"""List public checkpoints: short names, sizes and the pages with their settings.

Numbers come from the checkpoints' ``config.json``; `docs/models/` names the sources.
"""

from dataclasses import dataclass

from dllm_plugin.config.validation import did_you_mean
from dllm_plugin.models.checkpoints.sizes import EIGHT_BITS, FOUR_BITS, Sizes

PAGES = "docs/models/"
PRECISIONS = ("bf16", "FP8", "INT4")
LONG = 8192  # tokens of a request that must have room beside the weights
OTHER = 1.5  # GB of logits and graphs


@dataclass(frozen=True)
class Checkpoint:
    """Describe a public checkpoint.

    Attributes:
        hub: name on the Hugging Face hub.
        architecture: the first name in its ``architectures``.
        sizes: its weights and keys and values.
        context: positions that its authors state.
        decoding: strategy and policy by default.
        page: file in docs/models with the authors' settings and scores.
    """

    hub: str
    architecture: str
    sizes: Sizes
    context: int
    decoding: str
    page: str

    def gigabytes(self) -> tuple[float, float, float]:
        """Return the size of the weights in bf16, FP8 and INT4, in GB."""
        found = []
        for layer_bytes in (2, EIGHT_BITS, FOUR_BITS):
            found.append(self.sizes.weight_bytes(layer_bytes) / 1e9)
        return found[0], found[1], found[2]

    def kv_gigabytes(self) -> float:
        """Return the keys and values of 1,000 tokens in bf16, in GB."""
        return 1000 * 2 * self.sizes.kv_values / 1e9

    def fits(self, memory: float) -> str:
        """Return the largest precision that some GB have room for, with one request."""
        request = min(self.context, LONG) / 1000 * self.kv_gigabytes()
        for name, weights in zip(PRECISIONS, self.gigabytes(), strict=True):
            if weights + request + OTHER <= memory:
                return name
        return "no"


CACHED, BLOCKS = "dual_cache, threshold", "block_diffusion, threshold"
EDITED = "block_diffusion, joint_threshold"
LLADA = Sizes(6.98e9, 1.036e9, 262144)
DREAM = Sizes(6.526e9, 1.09e9, 28672)
MINI, FLASH = Sizes(15.61e9, 0.644e9, 20480), Sizes(101.6e9, 1.288e9, 32768)

CHECKPOINTS: dict[str, Checkpoint] = {
    "llada:8b": Checkpoint(
        "GSAI-ML/LLaDA-8B-Instruct", "LLaDAModelLM", LLADA, 4096, CACHED, "llada.md"
    ),
    "llada:8b-base": Checkpoint(
        "GSAI-ML/LLaDA-8B-Base", "LLaDAModelLM", LLADA, 4096, CACHED, "llada.md"
    ),
    "llada:1.5": Checkpoint(
        "GSAI-ML/LLaDA-1.5", "LLaDAModelLM", LLADA, 4096, CACHED, "llada.md"
    ),
    "dream:7b": Checkpoint(
        "Dream-org/Dream-v0-Instruct-7B", "DreamModel", DREAM, 2048, CACHED, "dream.md"
    ),
    "dream:7b-base": Checkpoint(
        "Dream-org/Dream-v0-Base-7B", "DreamModel", DREAM, 2048, CACHED, "dream.md"
    ),
    "diffucoder:7b": Checkpoint(
        "apple/DiffuCoder-7B-cpGRPO", "DreamModel", DREAM, 2048, CACHED, "dream.md"
    ),
    "sdar:1.7b": Checkpoint(
        "JetLM/SDAR-1.7B-Chat",
        "SDARForCausalLM",
        Sizes(1.409e9, 0.622e9, 57344),
        32768,
        BLOCKS,
        "sdar.md",
    ),
    "sdar:4b": Checkpoint(
        "JetLM/SDAR-4B-Chat",
        "SDARForCausalLM",
        Sizes(3.633e9, 0.778e9, 73728),
        32768,
        BLOCKS,
        "sdar.md",
    ),
    "sdar:8b": Checkpoint(
        "JetLM/SDAR-8B-Chat",
        "SDARForCausalLM",
        Sizes(6.946e9, 1.245e9, 73728),
        32768,
        BLOCKS,
        "sdar.md",
    ),
    "sdar:30b-a3b": Checkpoint(
        "JetLM/SDAR-30B-A3B-Chat",
        "SDARMoeForCausalLM",
        Sizes(29.91e9, 0.622e9, 49152),
        32768,
        BLOCKS,
        "sdar.md",
    ),
    "llada2.0:mini": Checkpoint(
        "inclusionAI/LLaDA2.0-mini",
        "LLaDA2MoeModelLM",
        MINI,
        32768,
        BLOCKS,
        "llada2.md",
    ),
    "llada2.0:flash": Checkpoint(
        "inclusionAI/LLaDA2.0-flash",
        "LLaDA2MoeModelLM",
        FLASH,
        32768,
        BLOCKS,
        "llada2.md",
    ),
    "llada2.1:mini": Checkpoint(
        "inclusionAI/LLaDA2.1-mini",
        "LLaDA2MoeModelLM",
        MINI,
        32768,
        EDITED,
        "llada2.md",
    ),
    "llada2.1:flash": Checkpoint(
        "inclusionAI/LLaDA2.1-flash",
        "LLaDA2MoeModelLM",
        FLASH,
        32768,
        EDITED,
        "llada2.md",
    ),
    "llada-moe:7b-a1b": Checkpoint(
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "LLaDAMoEModelLM",
        Sizes(6.713e9, 0.644e9, 65536),
        8192,
        CACHED,
        "llada.md",
    ),
    "rnd1:30b-a3b": Checkpoint(
        "radicalnumerics/RND1-Base-0910",
        "RND1LM",
        Sizes(29.91e9, 0.622e9, 49152),
        4096,
        "semi_autoregressive, entropy",
        "rnd1.md",
    ),
    "stable-diffcoder:8b": Checkpoint(
        "ByteDance-Seed/Stable-DiffCoder-8B-Instruct",
        "StableDiffcoderForCausalLM",
        Sizes(6.979e9, 1.271e9, 65536),
        8192,
        BLOCKS,
        "stable-diffcoder.md",
    ),
    "a2d:0.6b": Checkpoint(
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",
        "A2DQwen3LMHeadModel",
        Sizes(0.4404e9, 0.1556e9, 57344),
        40960,
        "semi_autoregressive, low_confidence",
        "a2d.md",
    ),
    "a2d:0.5b": Checkpoint(
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        "A2DQwen2LMHeadModel",
        Sizes(0.3578e9, 0.1361e9, 6144),
        32768,
        "semi_autoregressive, low_confidence",
        "a2d.md",
    ),
    "fast-dllm:1.5b": Checkpoint(
        "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
        "Fast_dLLM_QwenForCausalLM",
        Sizes(1.31e9, 0.233e9, 14336),
        32768,
        BLOCKS,
        "fast-dllm.md",
    ),
    "fast-dllm:7b": Checkpoint(
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
        "Fast_dLLM_QwenForCausalLM",
        DREAM,
        32768,
        BLOCKS,
        "fast-dllm.md",
    ),
}


def hub_name(model: str) -> str:
    """Return the hub name of a short name, and any other name as it is.

    Raises ValueError for a short name of one of our families that is not listed.
    """
    if model in CHECKPOINTS:
        return CHECKPOINTS[model].hub
    family = model.partition(":")[0]
    if ":" in model and any(name.startswith(family + ":") for name in CHECKPOINTS):
        raise ValueError(
            f"{model} is no short name (`diffuplug models` lists them)"
            + did_you_mean(model, CHECKPOINTS)
        )
    return model
