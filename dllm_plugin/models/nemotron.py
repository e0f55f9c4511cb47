"""Serve Nemotron-Labs-Diffusion: a Ministral whose weights have prefixes of their own.

An adapter may be applied to the draft rows of a forward only.
"""

from typing import Any

from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dllm_plugin.config.decode import get_decode_config

from .base import DiffusionModel
from .checkpoints import lora
from .checkpoints.weights import Shapes, Weights, WeightUpdate

THEIRS = {"model.": "encoder.", "lm_head.": "diffusion_head."}
RENAME = WeightsMapper(
    orig_to_new_prefix={theirs: ours for ours, theirs in THEIRS.items()}
)
TARGET = "o_proj"  # the only module that is not packed with others


class NemotronLabsDiffusionModel(DiffusionModel, MistralForCausalLM):
    """Serve nvidia/Nemotron-Labs-Diffusion-3B, -8B and -14B."""

    rename = RENAME
    # For LoRA and quantisation.
    hf_to_vllm_mapper = RENAME

    @classmethod
    def read_adapter(cls, vllm_config: VllmConfig) -> lora.LoraAdapter | None:
        """Read the adapter of `lora_path`; raise ValueError for a wrong draft adapter, too."""
        path = get_decode_config(vllm_config).draft_adapter
        load_format = vllm_config.load_config.load_format
        if path is not None and load_format in (*lora.FORMATS_WITHOUT_MERGE, "dummy"):
            raise ValueError(
                f"draft_adapter '{path}' cannot be added: load_format {load_format!r} reads no "
                "checkpoint. Leave one of them out."
            )
        if path is not None:
            model_config = vllm_config.model_config
            needed = cls.manifest(model_config).shapes
            read_draft_adapter(path, model_config, needed)
        return super().read_adapter(vllm_config)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load as the parent; draft rows get their adapter once weights are there."""
        loaded = super().load_weights(weights)
        config = get_decode_config(self.vllm_config)
        if config.draft_adapter is not None and self.draft_rows is None:
            self._adapt_drafts(config.draft_adapter)
        return loaded

    def new_update(self, backend: str) -> WeightUpdate:
        """Return as the parent; raise ValueError under a draft adapter."""
        if self.draft_rows is not None:
            raise ValueError(
                "Weights cannot be updated in place under draft_adapter: leave it out."
            )
        return super().new_update(backend)

    def _adapt_drafts(self, path: str) -> None:
        """Wrap the output projections of attention."""
        model_config = self.vllm_config.model_config
        shapes_ = self.manifest(model_config).shapes
        adapter = read_draft_adapter(path, model_config, shapes_)
        mine = range(self.model.start_layer, self.model.end_layer)
        like = self.model.layers[mine.start].input_layernorm.weight
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        # For the largest forward.
        self.draft_rows = like.new_zeros(most, 1)
        for number in mine:
            pair = adapter.pairs[f"encoder.layers.{number}.self_attn.{TARGET}"]
            attention = self.model.layers[number].self_attn
            attention.o_proj = DraftProjection(attention.o_proj, pair, self.draft_rows)

    @classmethod
    def head_name(cls) -> str:
        return "diffusion_head.weight"

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        found: Shapes = {}
        for name, shape in super().checkpoint_shapes(config).items():
            prefix, _, rest = name.partition(".")
            found[THEIRS[f"{prefix}."] + rest] = shape
        return found


def read_draft_adapter(
    path: str, model_config: ModelConfig, needed: Shapes
) -> lora.LoraAdapter:
    """Read a draft adapter; raise ValueError unless all of it fits this model."""
    adapter = lora.load_adapter(lora.adapter_folder(path))
    if adapter.targets != (TARGET,):
        raise ValueError(
            f"draft_adapter '{path}' targets {list(adapter.targets)}; only ['{TARGET}'] can be "
            "applied only to draft rows."
        )
    if adapter.base_name:
        config = model_config.hf_config
        names = (model_config.model, config._name_or_path, config.source_name)
        lora.check_base(adapter, names)
    lora.check_coverage(adapter, needed)
    return adapter


class DraftProjection(nn.Module):
    """Add a low-rank update to a row-parallel projection, in draft rows only.

    rows_T1  ``[tokens, 1]`` in the dtype of the weights, 1 in draft rows and else 0
    """

    a: Tensor
    b: Tensor
    rows_T1: Tensor

    def __init__(self, inner: nn.Module, pair: lora.LoraPair, rows_T1: Tensor) -> None:
        super().__init__()
        self.inner = inner
        # Each rank has some columns of the projection, and so of `a`.
        ranks = get_tensor_model_parallel_world_size()
        mine = pair.a.chunk(ranks, dim=1)[get_tensor_model_parallel_rank()]
        self.register_buffer("a", mine.to(rows_T1), persistent=False)
        self.register_buffer("b", (pair.scale * pair.b).to(rows_T1), persistent=False)
        self.register_buffer("rows_T1", rows_T1, persistent=False)
        self.sharded = ranks > 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the projection of rows ``[T, in]``, and the bias that is left to add."""
        output, bias = self.inner(x)
        low = x @ self.a.t()
        if self.sharded:
            low = tensor_model_parallel_all_reduce(low)
        return output + (low @ self.b.t()) * self.rows_T1[: len(x)], bias
