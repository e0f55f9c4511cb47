"""What our model classes add to the vLLM class they inherit from."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

from dllm_plugin.models.checkpoints import lora
from dllm_plugin.models.checkpoints.weights import (
    Manifest,
    Shapes,
    Weights,
    checked,
    checkpoint_folder,
    readable,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


# By its name, as vLLM names schedulers and workers: the engine stands above the models.
MODEL_STATE = "dllm_plugin.engine.model_state.DiffusionModelState"


class DiffusionModel:
    """Mixin before a vLLM causal LM: strict loading, adapter merge, diffusion model state.

    Attention layers stay the parent's: whether they look both ways is decided per step by the
    attention metadata.
    """

    logits_shift: ClassVar[bool]
    rename: ClassVar["WeightsMapper | None"] = None  # checkpoint names to the parent's names
    config: Any
    lm_head: Any
    logits_processor: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self.read_adapter(vllm_config)  # refuses a wrong one before any time is spent
        from dllm_plugin.attention.backends import offered
        from dllm_plugin.attention.rotary import defer
        from dllm_plugin.config.decode import get_decode_config
        from dllm_plugin.models.cublas import forgo_workspace

        forgo_workspace()
        with offered(vllm_config, get_decode_config(vllm_config).kv_cache_layout):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        defer(self, vllm_config.attention_config.backend)  # type: ignore[arg-type]
        self.vllm_config = vllm_config
        self.keeps_columns = get_decode_config(vllm_config).vocab_parallel

    @staticmethod
    def get_model_state_cls() -> type[Any]:
        """The ModelState through which model runner v2 drives diffusion."""
        state: type[Any] = resolve_obj_by_qualname(MODEL_STATE)
        return state

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        """Every tensor of a checkpoint with this config: name -> full shape."""
        raise NotImplementedError

    @classmethod
    def head_name(cls) -> str:
        """Checkpoint name of the LM head, which tied checkpoints may leave out."""
        return "lm_head.weight"

    @classmethod
    def manifest(cls, model_config: ModelConfig) -> Manifest:
        """What to expect of the checkpoint's files."""
        config = model_config.hf_config
        return Manifest(
            cls.checkpoint_shapes(config),
            optional=frozenset({cls.head_name()} if config.tie_word_embeddings else ()),
            quantized=model_config.model_arch_config.quantization_config is not None,
        )

    def _expected_here(self, model_config: ModelConfig) -> Manifest:
        """The manifest as far as vLLM's loader passes it on to this rank."""
        manifest, parallel = self.manifest(model_config), self.vllm_config.parallel_config
        if not (parallel.enable_expert_parallel and parallel.enable_ep_weight_filter):
            return manifest
        # The loader then leaves the experts of other ranks unread.
        experts = {name for name in manifest.shapes if ".mlp.experts." in name}
        return replace(manifest, optional=manifest.optional | experts)

    @classmethod
    def read_adapter(cls, vllm_config: VllmConfig) -> lora.LoraAdapter | None:
        """The adapter of `lora_path`, checked against this model; ValueError if it does not fit."""
        from dllm_plugin.config.decode import get_decode_config

        path = get_decode_config(vllm_config).lora_path
        if path is None:
            return None
        model_config, load_format = vllm_config.model_config, vllm_config.load_config.load_format
        manifest = cls.manifest(model_config)
        lora.check_mergeable(path, manifest.quantized, load_format)
        adapter = lora.load_adapter(lora.adapter_folder(path))
        config = model_config.hf_config
        lora.check_base(adapter, (model_config.model, config._name_or_path, config.source_name))
        lora.check_coverage(adapter, manifest.shapes)
        return adapter

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocab]; None on ranks that do not gather.

        With `vocab_parallel` the columns of this rank's share of the LM head, padding included.
        """
        if hidden_states.shape[0] == 0:
            # A prefill step has no canvas rows, and vLLM's CPU gather dies on an empty tensor.
            head, vocab_size = self.lm_head, self.config.vocab_size
            width = head.num_embeddings_per_partition if self.keeps_columns else vocab_size
            return hidden_states.new_empty((0, width))
        if self.keeps_columns:
            logits: torch.Tensor = self.logits_processor(
                self.lm_head, hidden_states, skip_gather=True
            )
            return logits
        return super().compute_logits(hidden_states)  # type: ignore[misc]

    def load_weights(self, weights: Weights) -> set[str]:
        """Load full tensors under checkpoint names; returns the names of the parameters filled.

        Raises ValueError naming the weight that is missing, surplus or mis-shaped, or the file
        that is damaged.
        """
        model_config, cache = (
            self.vllm_config.model_config,
            self.vllm_config.load_config.download_dir,
        )
        folder = checkpoint_folder(model_config.model, model_config.revision, cache)
        weights = checked(readable(weights, folder), self._expected_here(model_config))
        adapter = self.read_adapter(self.vllm_config)  # read again, not held: 100 MB at 8B
        if adapter is not None:
            weights = lora.merge(weights, adapter)
        if self.rename is not None:
            weights = self.rename.apply(weights)
        return super().load_weights(weights)  # type: ignore[misc]
