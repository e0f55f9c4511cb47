"""Tiny checkpoints for the omni tests, written by code, and what they should compute."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def autoregressive(
    folder: Path,
    family: str,
    scale: float = 0.2,
    nan_rows: int = 0,
    vocab: int = 256,
    hidden: int = 64,
) -> Path:
    """A `Llama` or `Qwen2` checkpoint with strong random weights.

    A small `scale` of the layers makes text that repeats itself. The first `nan_rows` rows of the
    LM head (from token 7 on) are NaN.
    """
    import transformers

    sizes = {name: size for name, size in SIZES.items() if name != "torch_dtype"}
    sizes |= {"vocab_size": vocab, "hidden_size": hidden}
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    for name, weight in model.named_parameters():
        spread = scale if "layers" in name else 0.2
        weight.data = (
            torch.randn_like(weight) * spread if weight.dim() > 1 else weight.data
        )
    model.lm_head.weight.data[7 : 7 + nan_rows] = float("nan")
    model.save_pretrained(folder)
    return folder


class Reference:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def rows(self, tokens: list[int], layers: list[int] | None = None) -> torch.Tensor:
        """Hidden states of all tokens but the last: ``[n - 1, hidden]`` or by layer."""
        states = self.model.model(
            torch.tensor([tokens[:-1]]), output_hidden_states=True
        )
        if layers is None:
            return states.last_hidden_state[0]
        return torch.stack([states.hidden_states[layer][0] for layer in layers], dim=1)

    def error(
        self, output: Any, index: int = 0, layers: list[int] | None = None
    ) -> float:
        """Largest difference to a finished request's hidden states, whose size is checked."""
        from dllm_plugin.omni import hidden_states_of

        found = hidden_states_of(output, index)
        assert found is not None
        tokens = [*output.prompt_token_ids, *output.outputs[index].token_ids]
        wanted = self.rows(tokens, layers)[found.start :]
        rows = torch.from_numpy(found.rows.copy())
        assert rows.shape == wanted.shape and rows.dtype == torch.float32
        return float((rows - wanted).abs().max())


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens without pattern."""
    return [(7 * i * (seed + 3) + i * i) % 250 + 3 for i in range(length)]


def twenty() -> tuple[list[dict[str, Any]], list[Any]]:
    """Mixed requests: prompts of 1 to 150 tokens, answers of 30 to 36; every fifth did not ask for
    hidden states."""
    from vllm import SamplingParams

    from dllm_plugin.omni import hidden_state_params

    lengths = [5, 150, 17, 33, 70, 64, 1, 100] * 3
    prompts = [{"prompt_token_ids": prompt(n, i)} for i, n in enumerate(lengths[:20])]
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    makers = [hidden_state_params] * 4 + [SamplingParams]
    return prompts, [makers[i % 5](max_tokens=30 + i % 7, **common) for i in range(20)]


def largest_error(reference: Reference, outputs: list[Any]) -> float:
    """Of the answers to :func:`twenty`, whose lengths, first rows and opt-outs are checked."""
    from dllm_plugin.omni import hidden_states_of

    assert [len(out.outputs[0].token_ids) for out in outputs] == [
        30 + i % 7 for i in range(20)
    ]
    found = [hidden_states_of(output) for output in outputs]
    assert [rows and rows.start for rows in found] == [0, 0, 0, 0, None] * 4
    return max(reference.error(outputs[i]) for i, rows in enumerate(found) if rows)


def pipeline(folder: Path) -> Path:
    """The example's pipeline of a few kilobytes with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    found = spec_from_file_location("text_to_image", EXAMPLES / "text_to_image.py")
    assert found is not None and found.loader is not None
    example = module_from_spec(found)
    found.loader.exec_module(example)
    return Path(example.random_pipeline(folder))
