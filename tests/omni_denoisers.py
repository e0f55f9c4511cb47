"""Tiny diffusion transformers, one for each entry point, and a checkpoint for them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.sequence import IntermediateTensors

from dllm_plugin.omni.diffusion import Condition, NonARModel

HIDDEN, WORDS = 64, 256


class Denoiser(NonARModel):
    """Noise ``[tokens, hidden]`` attends to itself and to a summary of the prompt."""

    supports_pp = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.attention = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.words(input_ids)

    def load_weights(self, weights: Any) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: Any, device: Any
    ) -> Any:
        rows = torch.zeros(batch_size, HIDDEN, dtype=dtype, device=device)
        return IntermediateTensors({"rows": rows})

    def check_params(self, params: dict[str, Any]) -> None:
        if not 0 < params.get("steps", 1) <= 100:
            raise ValueError(
                f"steps must lie between 1 and 100, got {params['steps']}."
            )

    def batch_key(self, condition: Condition) -> Any:
        return condition.params.get("tokens", 4)

    def velocity(self, x_BLH: torch.Tensor, step: int) -> torch.Tensor:
        q, k, v = self.attention(x_BLH + 0.1 * step).chunk(3, dim=-1)
        return self.mix(torch.softmax(q @ k.transpose(1, 2) / HIDDEN**0.5, dim=-1) @ v)

    def denoise(self, condition: list[Condition], rows: torch.Tensor) -> torch.Tensor:
        """Rows of all prompts -> ``[requests, tokens, hidden]``."""
        summary = torch.stack(
            [rows[a:b].mean(0) for a, b in (c.span for c in condition)]
        )[:, None]
        shape = (self.batch_key(condition[0]), HIDDEN)
        noise = [torch.randn(shape, generator=c.generator()) for c in condition]
        x_BLH = torch.stack(noise).to(rows)
        steps = torch.tensor(
            [c.params.get("steps", 1) for c in condition], device=rows.device
        )
        for step in range(int(steps.max())):
            moved = x_BLH - 0.1 * self.velocity(x_BLH + summary, step)
            x_BLH = torch.where((step < steps)[:, None, None], moved, x_BLH)
        return x_BLH


class SampleModel(Denoiser):
    """sample() loops over forward(), which must stay itself; on two ranks the first one embeds."""

    def forward(
        self, input_ids: Any = None, *args: Any, condition: Any = None, **kwargs: Any
    ) -> Any:
        if condition is None:
            return IntermediateTensors({"rows": self.words(input_ids)})
        return self.denoise([condition], input_ids)[0]

    def sample(
        self, condition: Any, input_ids: Any, intermediate_tensors: Any, **kw: Any
    ) -> Any:
        rows = (
            intermediate_tensors["rows"]
            if intermediate_tensors
            else self.words(input_ids)
        )
        return [self(rows, condition=one) for one in condition]

    def diffuse(self, **kwargs: Any) -> Any:
        raise AssertionError("sample comes first")


class ForwardModel(Denoiser):
    """forward() returns one stacked tensor."""

    def forward(
        self, input_ids: Any = None, *args: Any, condition: Any = None, **kwargs: Any
    ) -> Any:
        return self.denoise(condition, self.words(input_ids))

    def diffuse(self, **kwargs: Any) -> Any:
        raise AssertionError("forward comes first")


class DiffuseModel(Denoiser):
    """diffuse() alone."""

    def diffuse(self, condition: Any, input_ids: Any, **kwargs: Any) -> Any:
        return list(self.denoise(condition, self.words(input_ids)))


MODELS = {"sample": SampleModel, "forward": ForwardModel, "diffuse": DiffuseModel}


def register() -> None:
    """Classes, not names: vLLM inspects a named class in a new process, ten seconds each."""
    from vllm import ModelRegistry

    for name, model in MODELS.items():
        ModelRegistry.register_model(f"TinyDenoiser{name.capitalize()}", model)


def checkpoint(folder: Path, name: str) -> Path:
    """A folder with random weights for one of MODELS."""
    folder.mkdir(parents=True)
    config = {
        "architectures": [f"TinyDenoiser{name.capitalize()}"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "words": (WORDS, HIDDEN),
        "attention": (3 * HIDDEN, HIDDEN),
        "mix": (HIDDEN, HIDDEN),
    }
    weights = {
        f"{key}.weight": 0.2 * torch.randn(shape, generator=generator)
        for key, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


WISHES = [
    ([5 + i] * (1 + 9 * i), {"seed": i, "steps": 2 + i, "tokens": 4 + i % 2})
    for i in range(8)
]


def run(llm: Any, wishes: Any = None) -> list[Any]:
    """Outputs of a batch of requests."""
    from vllm import PoolingParams

    wishes = WISHES if wishes is None else wishes
    return llm.encode(
        [{"prompt_token_ids": prompt} for prompt, _ in wishes],
        [PoolingParams(task="plugin", extra_kwargs=params) for _, params in wishes],
        pooling_task="plugin",
        use_tqdm=False,
    )


def directly(model: Any, entry: str, wish: Any) -> torch.Tensor:
    """The module called by hand, for one request."""
    prompt, params = wish
    device = model.words.weight.device
    ids = torch.tensor(prompt, device=device)
    condition = [Condition("direct", params, (0, len(prompt)))]
    with torch.inference_mode():
        (tensor,) = getattr(model, entry)(
            condition=condition, input_ids=ids, intermediate_tensors=None
        )
    return tensor.cpu()
