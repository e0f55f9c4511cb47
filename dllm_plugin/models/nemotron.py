"""Serve Nemotron-Labs-Diffusion: a Ministral whose weights have prefixes of their own."""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.draft_adapter import (
    TARGET,
    DraftProjection,
    draft_rows,
    read_draft_adapter,
)
from dllm_plugin.models.checkpoints.lora import FORMATS_WITHOUT_MERGE, LoraAdapter
from dllm_plugin.models.checkpoints.weights import Shapes, Weights, WeightUpdate

THEIRS = {"model.": "encoder.", "lm_head.": "diffusion_head."}
RENAME = WeightsMapper(
    orig_to_new_prefix={theirs: ours for ours, theirs in THEIRS.items()}
)


class NemotronLabsDiffusionModel(DiffusionModel, MistralForCausalLM):
    """Serve nvidia/Nemotron-Labs-Diffusion-3B, -8B and -14B."""

    rename = RENAME
    # For LoRA and quantisation.
    hf_to_vllm_mapper = RENAME

    @classmethod
    def read_adapter(cls, vllm_config: VllmConfig) -> LoraAdapter | None:
        """Read the adapter of `lora_path`; raise ValueError for a wrong draft adapter, too."""
        path = get_decode_config(vllm_config).draft_adapter
        load_format = vllm_config.load_config.load_format
        if path is not None and load_format in (*FORMATS_WITHOUT_MERGE, "dummy"):
            raise ValueError(
                f"draft_adapter '{path}' cannot be added: load_format {load_format!r} reads no "
                "checkpoint. Leave one of them out."
            )
        if path is not None:
            model_config = vllm_config.model_config
            read_draft_adapter(path, model_config, cls.manifest(model_config).shapes)
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
        self.draft_rows = draft_rows(self.vllm_config, like)
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
        for name, shape in shapes.decoder(config).items():
            prefix, _, rest = name.partition(".")
            found[THEIRS[f"{prefix}."] + rest] = shape
        return found
