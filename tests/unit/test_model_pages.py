"""The memory that docs/models/README.md states is that of the checkpoints' tensors."""

import math
import re
from typing import Any

import pytest
from documented import ROOT

from dllm_plugin.models import configs
from dllm_plugin.models.checkpoints.weights import Shapes
from dllm_plugin.models.dream import DreamModel
from dllm_plugin.models.fast_dllm import FastDLLMQwenForCausalLM
from dllm_plugin.models.llada import LLaDAModelLM
from dllm_plugin.models.llada2 import LLaDA2MoeModelLM
from dllm_plugin.models.sdar import SDARForCausalLM, SDARMoeForCausalLM
from dllm_plugin.models.stable_diffcoder import StableDiffCoder

PAGE = ROOT / "docs" / "models" / "README.md"
INT4_BYTES = 4.25 / 8  # with a scale of 16 bits and a zero point for 128 weights
OTHER_BYTES = 1.5e9  # logits and graphs
CARDS = (8, 12, 16, 24, 32, 48, 80, 141, 2 * 141)
QWEN = {"max_position_embeddings": 32768}


def sdar(hidden: int, inner: int, layers: int, heads: int) -> Any:
    return configs.SDARConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        **QWEN,
    )


def qwen2(kind: Any, hidden: int, inner: int, heads: int, kv: int, **rest: Any) -> Any:
    return kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=28,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        **rest,
    )


LLADA = configs.LLaDAConfig(
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    mlp_hidden_size=12288,
    vocab_size=126464,
    embedding_size=126464,
)
SDAR_MOE = configs.SDARMoeConfig(
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    num_experts=128,
    vocab_size=151936,
    tie_word_embeddings=False,
)
FLASH = configs.LLaDA2Config(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=9216,
    moe_intermediate_size=1024,
    vocab_size=157184,
)
DIFFCODER = configs.StableDiffCoderConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=155136,
    tie_word_embeddings=False,
)
V2 = configs.FastDLLMConfig
# Checkpoint, config, class, and the context of the request that has to fit.
CHECKPOINTS = {
    "LLaDA-8B, LLaDA-1.5": (LLADA, LLaDAModelLM, 4096),
    "Dream-7B, DiffuCoder-7B": (
        qwen2(
            *(configs.DreamConfig, 3584, 18944, 28, 4),
            vocab_size=152064,
            tie_word_embeddings=False,
        ),
        DreamModel,
        2048,
    ),
    "SDAR-1.7B-Chat": (sdar(2048, 6144, 28, 16), SDARForCausalLM, 8192),
    "SDAR-4B-Chat": (sdar(2560, 9728, 36, 32), SDARForCausalLM, 8192),
    "SDAR-8B-Chat": (sdar(4096, 12288, 36, 32), SDARForCausalLM, 8192),
    "SDAR-30B-A3B": (SDAR_MOE, SDARMoeForCausalLM, 8192),
    "LLaDA2-mini": (configs.LLaDA2Config(), LLaDA2MoeModelLM, 8192),
    "LLaDA2-flash": (FLASH, LLaDA2MoeModelLM, 8192),
    "Stable-DiffCoder-8B": (DIFFCODER, StableDiffCoder, 8192),
    "Fast_dLLM_v2_1.5B": (
        qwen2(V2, 1536, 8960, 12, 2, vocab_size=151936, tie_word_embeddings=True),
        FastDLLMQwenForCausalLM,
        8192,
    ),
    "Fast_dLLM_v2_7B": (
        qwen2(V2, 3584, 18944, 28, 4, vocab_size=152064, tie_word_embeddings=False),
        FastDLLMQwenForCausalLM,
        8192,
    ),
}


def rows() -> dict[str, list[str]]:
    """Cells of the table of memory, by checkpoint."""
    table = PAGE.read_text(encoding="utf-8").partition("| checkpoint | weights")[2]
    found = {}
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[name] = cells
    return found


def weight_bytes(config: Any, shapes: Shapes, layer_bytes: float) -> float:
    """Bytes of all weights, with so many for each weight of a layer's matrices."""
    total = 0.0
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        in_layer = re.search(r"\.(layers|blocks)\.\d", name) and len(shape) > 1
        total += math.prod(shape) * (layer_bytes if in_layer else 2)
    return total


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_memory(name: str) -> None:
    config, model, context = CHECKPOINTS[name]
    shapes = model.checkpoint_shapes(config)
    head = getattr(config, "head_dim", None)
    head = head or config.hidden_size // config.num_attention_heads
    kv_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head
    sizes, cards = [], []
    for layer_bytes in (2, 1, INT4_BYTES):
        weights = weight_bytes(config, shapes, layer_bytes)
        needed = weights + context * kv_bytes + OTHER_BYTES
        sizes.append(f"{weights / 1e9:.1f}")
        card = next(card for card in CARDS if 0.92e9 * card >= needed)
        cards.append("2 x 141" if card == CARDS[-1] else str(card))
    assert rows()[name] == [
        ", ".join(sizes),
        f"{kv_bytes / 1e6:.2f}",
        f"{context:,}",
        ", ".join(cards),
    ]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_page_of_the_family_has_the_same_sizes(name: str) -> None:
    sizes = rows()[name][0]
    pages = [path.read_text(encoding="utf-8") for path in PAGE.parent.glob("[a-z]*.md")]
    spelled = (f"| {sizes} |", f"| {sizes.replace(', ', ' | ')} |")
    assert any(text in page for page in pages for text in spelled)


def test_every_row_is_computed() -> None:
    assert rows().keys() == CHECKPOINTS.keys()
