"""The models we serve: which class, and the facts that other rooms need without importing it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What sets one family of masked diffusion models apart from the others."""

    name: str
    logits_shift: bool  # True: row i of the logits predicts position i + 1
    mask_tokens: tuple[str, ...]  # texts under which tokenizers know the mask
    turn_end_tokens: tuple[str, ...]  # end a turn besides the configured EOS
    block_length: int | None = None  # what checkpoints that do not say it were trained with
    threshold: float = 0.9  # confidence that its authors ask for
    absolute_grid: bool = False  # True: blocks lie at multiples of their length, prompt included


LLADA = Family("llada", False, ("<|mdm_mask|>",), ("<|eot_id|>",))
# `<|dlm_pad|>` is how DiffuCoder, a Dream checkpoint, fills the rest of an answer.
DREAM = Family("dream", True, ("<|mask|>",), ("<|im_end|>", "<|dlm_pad|>"))

ARCHITECTURES: dict[str, str] = {
    "LLaDAModelLM": "dllm_plugin.models.llada:LLaDAModelLM",
    "LLaDAForDiffusionLM": "dllm_plugin.models.llada:LLaDAModelLM",
    "DreamModel": "dllm_plugin.models.dream:DreamModel",
    "DreamForDiffusionLM": "dllm_plugin.models.dream:DreamModel",
}

FAMILIES: dict[str, Family] = {
    "LLaDAModelLM": LLADA,
    "LLaDAForDiffusionLM": LLADA,
    "DreamModel": DREAM,
    "DreamForDiffusionLM": DREAM,
}


def register_configs() -> None:
    """Teach transformers our config classes and Dream's tokenizer; may be called again.

    Must run before any config or tokenizer of these models is loaded: with nothing registered,
    transformers wants the repository's own Python code and asks for it on the terminal.
    """
    from transformers import AutoConfig, AutoTokenizer

    from dllm_plugin.models.configs import DreamConfig, LLaDAConfig
    from dllm_plugin.models.tokenization import DreamTokenizer

    AutoConfig.register("llada", LLaDAConfig, exist_ok=True)
    AutoConfig.register("Dream", DreamConfig, exist_ok=True)
    AutoTokenizer.register(DreamConfig, tokenizer_class=DreamTokenizer, exist_ok=True)
