"""List public checkpoints: short names, sizes and the pages with their settings.

Numbers come from the checkpoints' ``config.json``; `docs/models/` names the sources.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dllm_plugin.config.validation import did_you_mean
from dllm_plugin.models.checkpoints.sizes import (
    EIGHT_BITS,
    FOUR_BITS,
    NAMES,
    Sizes,
    count_sizes,
)

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
        shape: keys of its ``config.json`` that its sizes follow from.
        context: positions that its authors state.
        decoding: strategy and policy by default.
        page: file in docs/models with the authors' settings and scores.
    """

    hub: str
    architecture: str
    shape: dict[str, Any]
    context: int
    decoding: str
    page: str

    @cached_property
    def sizes(self) -> Sizes:
        """The numbers of its weights, and of its keys and values."""
        return count_sizes(self.shape)

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


def shape_of(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: int = False,
    **more: int,
) -> dict[str, Any]:
    """Return the keys of a ``config.json``; `more` are those of heads and experts."""
    values = (hidden, inner, layers, heads, kv_heads, vocab, tied)
    return dict(zip(NAMES, values, strict=True)) | more


def qwen3(
    hidden: int, inner: int, layers: int, heads: int, vocab: int = 151936
) -> dict[str, Any]:
    """Return the keys of a dense model with 8 KV heads of 128 numbers."""
    return shape_of(hidden, inner, layers, heads, 8, vocab, head_dim=128)


EXPERTS_128 = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
EXPERTS_64 = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
}
EXPERTS_256 = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LLADA = shape_of(4096, 12288, 32, 32, 32, 126464)
DREAM = shape_of(3584, 18944, 28, 28, 4, 152064)
QWEN_8B = qwen3(4096, 12288, 36, 32)
QWEN_MOE = shape_of(2048, 6144, 48, 32, 4, 151936, head_dim=128, **EXPERTS_128)
MINI = shape_of(2048, 5120, 20, 16, 4, 157184, moe_intermediate_size=512, **EXPERTS_256)
FLASH = shape_of(
    4096, 9216, 32, 32, 4, 157184, moe_intermediate_size=1024, **EXPERTS_256
)

CHECKPOINTS: dict[str, Checkpoint] = {}


def _list(
    architecture: str,
    context: int,
    decoding: str,
    page: str,
    rows: dict[str, tuple[str, dict[str, Any]]],
) -> None:
    """Add checkpoints that share these facts: short name to hub name and shape."""
    for name, (hub, shape) in rows.items():
        facts = (architecture, shape, context, decoding, page)
        CHECKPOINTS[name] = Checkpoint(hub, *facts)


_list(
    *("LLaDAModelLM", 4096, CACHED, "llada.md"),
    {
        "llada:8b": ("GSAI-ML/LLaDA-8B-Instruct", LLADA),
        "llada:8b-base": ("GSAI-ML/LLaDA-8B-Base", LLADA),
        "llada:1.5": ("GSAI-ML/LLaDA-1.5", LLADA),
    },
)
_list(
    *("DreamModel", 2048, CACHED, "dream.md"),
    {
        "dream:7b": ("Dream-org/Dream-v0-Instruct-7B", DREAM),
        "dream:7b-base": ("Dream-org/Dream-v0-Base-7B", DREAM),
        "diffucoder:7b": ("apple/DiffuCoder-7B-cpGRPO", DREAM),
    },
)
_list(
    *("SDARForCausalLM", 32768, BLOCKS, "sdar.md"),
    {
        "sdar:1.7b": ("JetLM/SDAR-1.7B-Chat", qwen3(2048, 6144, 28, 16)),
        "sdar:4b": ("JetLM/SDAR-4B-Chat", qwen3(2560, 9728, 36, 32)),
        "sdar:8b": ("JetLM/SDAR-8B-Chat", QWEN_8B),
    },
)
_list(
    *("SDARMoeForCausalLM", 32768, BLOCKS, "sdar.md"),
    {"sdar:30b-a3b": ("JetLM/SDAR-30B-A3B-Chat", QWEN_MOE)},
)
_list(
    *("IDLMForCausalLM", 32768, "introspective, sequential", "idlm.md"),
    {
        "idlm:8b": ("yifanyu/I-DLM-8B", QWEN_8B),
        "idlm:32b": ("yifanyu/I-DLM-32B", qwen3(5120, 25600, 64, 64)),
    },
)
_list(
    *("WeDLMBiasedForCausalLM", 16384, "causal_window, entropy", "wedlm.md"),
    {
        "wedlm:7b": (
            "tencent/WeDLM-7B-Instruct",
            shape_of(3584, 18944, 28, 28, 4, 151936),
        )
    },
)
_list(
    *("WeDLMForCausalLM", 16384, "causal_window, entropy", "wedlm.md"),
    {"wedlm:8b": ("tencent/WeDLM-8B-Instruct", QWEN_8B)},
)
_list(
    *("LLaDA2MoeModelLM", 32768, BLOCKS, "llada2.md"),
    {
        "llada2.0:mini": ("inclusionAI/LLaDA2.0-mini", MINI),
        "llada2.0:flash": ("inclusionAI/LLaDA2.0-flash", FLASH),
    },
)
_list(
    *("LLaDA2MoeModelLM", 32768, EDITED, "llada2.md"),
    {
        "llada2.1:mini": ("inclusionAI/LLaDA2.1-mini", MINI),
        "llada2.1:flash": ("inclusionAI/LLaDA2.1-flash", FLASH),
    },
)
_list(
    *("LLaDA22MoeModelLM", 131072, EDITED, "llada2.md"),
    {
        "llada2.2:mini": ("inclusionAI/LLaDA2.2-mini", MINI),
        "llada2.2:flash": ("inclusionAI/LLaDA2.2-flash", FLASH),
    },
)
_list(
    *("LLaDAMoEModelLM", 8192, CACHED, "llada.md"),
    {
        "llada-moe:7b-a1b": (
            "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
            shape_of(2048, 1024, 16, 16, 16, 157184, **EXPERTS_64),
        )
    },
)
_list(
    *("RND1LM", 4096, "semi_autoregressive, entropy", "rnd1.md"),
    {"rnd1:30b-a3b": ("radicalnumerics/RND1-Base-0910", QWEN_MOE)},
)
_list(
    *("StableDiffcoderForCausalLM", 8192, BLOCKS, "stable-diffcoder.md"),
    {
        "stable-diffcoder:8b": (
            "ByteDance-Seed/Stable-DiffCoder-8B-Instruct",
            shape_of(4096, 14336, 32, 32, 8, 155136),
        )
    },
)
_list(
    *("NemotronLabsDiffusionModel", 262144, BLOCKS, "nemotron.md"),
    {
        "nemotron-diffusion:3b": (
            "nvidia/Nemotron-Labs-Diffusion-3B",
            qwen3(3072, 9216, 26, 32, 131072),
        ),
        "nemotron-diffusion:8b": (
            "nvidia/Nemotron-Labs-Diffusion-8B",
            qwen3(4096, 14336, 34, 32, 131072),
        ),
        "nemotron-diffusion:14b": (
            "nvidia/Nemotron-Labs-Diffusion-14B",
            qwen3(5120, 16384, 40, 32, 131072),
        ),
    },
)
_list(
    *("A2DQwen3LMHeadModel", 40960, "semi_autoregressive, low_confidence", "a2d.md"),
    {
        "a2d:0.6b": (
            "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",
            shape_of(1024, 3072, 28, 16, 8, 151936, True, head_dim=128),
        )
    },
)
_list(
    *("A2DQwen2LMHeadModel", 32768, "semi_autoregressive, low_confidence", "a2d.md"),
    {
        "a2d:0.5b": (
            "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
            shape_of(896, 4864, 24, 14, 2, 151936, True),
        )
    },
)
_list(
    *("Fast_dLLM_QwenForCausalLM", 32768, BLOCKS, "fast-dllm.md"),
    {
        "fast-dllm:1.5b": (
            "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
            shape_of(1536, 8960, 28, 12, 2, 151936, True),
        ),
        "fast-dllm:7b": ("Efficient-Large-Model/Fast_dLLM_v2_7B", DREAM),
    },
)


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
