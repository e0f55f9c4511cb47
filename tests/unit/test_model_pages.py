"""The memory that docs/models/README.md states is that of the checkpoints' tensors."""

import math
import re
from importlib import import_module
from typing import Any

import pytest
from documented import ROOT

from dllm_plugin.models import ARCHITECTURES, configs, mixture_configs
from dllm_plugin.models.catalogue import CHECKPOINTS, LONG, OTHER, PRECISIONS
from dllm_plugin.models.checkpoints.sizes import EIGHT_BITS, FOUR_BITS
from dllm_plugin.models.checkpoints.weights import Shapes

PAGE = ROOT / "docs" / "models" / "README.md"
CARDS = (8, 12, 16, 24, 32, 48, 80, 141, 2 * 141)
# Rows of the table, by a short name of the catalogue.
ROWS = {
    "LLaDA-8B, LLaDA-1.5": "llada:8b",
    "Dream-7B, DiffuCoder-7B": "dream:7b",
    "SDAR-1.7B-Chat": "sdar:1.7b",
    "SDAR-4B-Chat": "sdar:4b",
    "SDAR-8B-Chat": "sdar:8b",
    "SDAR-30B-A3B": "sdar:30b-a3b",
    "LLaDA2-mini": "llada2.0:mini",
    "LLaDA2-flash": "llada2.0:flash",
    "Stable-DiffCoder-8B": "stable-diffcoder:8b",
    "Fast_dLLM_v2_1.5B": "fast-dllm:1.5b",
    "Fast_dLLM_v2_7B": "fast-dllm:7b",
    "LLaDA-MoE-7B-A1B": "llada-moe:7b-a1b",
    "RND1-Base-0910": "rnd1:30b-a3b",
    "WeDLM-7B": "wedlm:7b",
    "I-DLM-8B, WeDLM-8B": "idlm:8b",
    "I-DLM-32B": "idlm:32b",
    "Nemotron-3B": "nemotron-diffusion:3b",
    "Nemotron-8B": "nemotron-diffusion:8b",
    "Nemotron-14B": "nemotron-diffusion:14b",
    "Qwen3-0.6B-diffusion": "a2d:0.6b",
    "Qwen2.5-Coder-0.5B-diffusion": "a2d:0.5b",
}
# Classes of configurations, by architecture.
CONFIGS = {
    "LLaDAModelLM": configs.LLaDAConfig,
    "DreamModel": configs.DreamConfig,
    "SDARForCausalLM": configs.SDARConfig,
    "SDARMoeForCausalLM": mixture_configs.SDARMoeConfig,
    "LLaDA2MoeModelLM": mixture_configs.LLaDA2Config,
    "StableDiffcoderForCausalLM": configs.StableDiffCoderConfig,
    "Fast_dLLM_QwenForCausalLM": configs.FastDLLMConfig,
    "LLaDAMoEModelLM": mixture_configs.LLaDAMoEConfig,
    "RND1LM": mixture_configs.RND1Config,
    "IDLMForCausalLM": configs.SDARConfig,
    "WeDLMBiasedForCausalLM": configs.WeDLMConfig,
    "NemotronLabsDiffusionModel": configs.NemotronConfig,
    "A2DQwen3LMHeadModel": configs.A2DQwen3Config,
    "A2DQwen2LMHeadModel": configs.A2DQwen2Config,
}


def tensors_of(name: str) -> tuple[Any, Shapes]:
    """The configuration of a checkpoint of the catalogue, and the shapes of its tensors."""
    found = CHECKPOINTS[name]
    kind = CONFIGS[found.architecture]
    renamed = getattr(kind, "attribute_map", {})
    shape = {renamed.get(key, key): value for key, value in found.shape.items()}
    if "LLaDAModelLM" in found.architecture:
        shape["embedding_size"] = shape["vocab_size"]
    config = kind(**shape)
    module, _, model = ARCHITECTURES[found.architecture].partition(":")
    shapes: Shapes = getattr(import_module(module), model).checkpoint_shapes(config)
    return config, shapes


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


@pytest.mark.parametrize("row", ROWS)
def test_memory(row: str) -> None:
    found = CHECKPOINTS[ROWS[row]]
    config, shapes = tensors_of(ROWS[row])
    context = min(found.context, LONG)
    sizes, cards = [], []
    for layer_bytes, counted in zip(
        (2, EIGHT_BITS, FOUR_BITS), found.gigabytes(), strict=True
    ):
        weights = weight_bytes(config, shapes, layer_bytes) / 1e9
        assert counted == pytest.approx(weights, rel=0.001)
        sizes.append(f"{weights:.1f}")
        needed = weights + context / 1000 * found.kv_gigabytes() + OTHER
        card = next(card for card in CARDS if 0.92 * card >= needed)
        cards.append("2 x 141" if card == CARDS[-1] else str(card))
        assert found.fits(0.92 * card) in PRECISIONS
    assert rows()[row] == [
        ", ".join(sizes),
        f"{found.kv_gigabytes():.2f}",
        f"{context:,}",
        ", ".join(cards),
    ]


@pytest.mark.parametrize("row", ROWS)
def test_the_page_of_the_family_has_the_same_sizes(row: str) -> None:
    sizes = rows()[row][0]
    page = PAGE.parent / CHECKPOINTS[ROWS[row]].page
    text = page.read_text(encoding="utf-8")
    spelled = (f"| {sizes} |", f"| {sizes.replace(', ', ' | ')} |")
    assert any(one in text for one in spelled)


def test_every_row_is_computed() -> None:
    assert rows().keys() == ROWS.keys()


@pytest.mark.parametrize("card", [12, 24])
def test_what_fits_on_a_card(card: int) -> None:
    """Each checkpoint in the largest precision that fits."""
    cells = []
    for precision in PRECISIONS:
        fitting = []
        for name, found in CHECKPOINTS.items():
            if found.fits(0.92 * card) == precision:
                fitting.append(f"`{name}`")
        cells.append(", ".join(fitting))
    row = f"| {card} GB | {' | '.join(cells)} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()
