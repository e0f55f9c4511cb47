"""Extend vLLM's model classes: strict loading, adapter merge, our attention and model state."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_pp_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.quantisation import stores_experts

from . import forgo_workspace
from .checkpoints import lora, shapes
from .checkpoints.layouts import Packing
from .checkpoints.quantised import quantise_head
from .checkpoints.weights import (
    PARTIAL_BACKENDS,
    Manifest,
    Shapes,
    Weights,
    WeightUpdate,
    check_updatable,
    checked,
    folder_of,
    readable,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


# A name instead of an import, because `engine/` imports `models/`; vLLM names schedulers alike.
MODEL_STATE = "dllm_plugin.engine.model_state.DiffusionModelState"


class DiffusionModel:
    """Turn a causal LM of vLLM into a diffusion model; the first base class of our models.

    Attention layers stay the parent's. The attention metadata of each step decides which keys a
    position sees.
    """

    # ``[tokens, 1]``, 1 in rows to which a draft adapter is applied; None without an adapter.
    draft_rows: Tensor | None = None
    update: WeightUpdate | None = None  # in progress: weights come in parts
    # vLLM takes an adapted head to compute one row a request, and a canvas has many.
    embedding_modules: ClassVar[dict[str, str]] = {}
    # Checkpoint names to the parent's names.
    rename: ClassVar["WeightsMapper | None"] = None
    # Query, key and value have biases; each head of query and key has a norm.
    has_bias: ClassVar[bool] = False
    has_qk_norm: ClassVar[bool] = False
    config: Any
    lm_head: Any
    logits_processor: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Raises for a wrong adapter before weights are loaded.
        self.read_adapter(vllm_config)
        from dllm_plugin.attention.registry import registered
        from dllm_plugin.attention.rotary import defer

        forgo_workspace()
        config = get_decode_config(vllm_config)
        with registered(vllm_config, config.kv_cache_layout):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        defer(self, vllm_config.attention_config.backend)  # type: ignore[arg-type]
        self.vllm_config = vllm_config
        self.keeps_columns = config.vocab_parallel
        has_head = get_pp_group().is_last_rank
        if has_head and config.head_quantization != "none":
            quantise_head(self.lm_head, config.head_quantization)

    @staticmethod
    def get_model_state_cls() -> type[Any]:
        """Return the ModelState class, which vLLM's model runner v2 calls in every step."""
        state: type[Any] = resolve_obj_by_qualname(MODEL_STATE)
        return state

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        """Return every tensor of a checkpoint with this config: name -> full shape."""
        return shapes.decoder(config, bias=cls.has_bias, qk_norm=cls.has_qk_norm)

    @classmethod
    def head_name(cls) -> str:
        """Return the checkpoint name of the LM head; checkpoints with tied weights may omit it."""
        return "lm_head.weight"

    @classmethod
    def manifest(cls, model_config: ModelConfig) -> Manifest:
        """Return the tensors that the checkpoint's files must contain."""
        config = model_config.hf_config
        stored = model_config.model_arch_config.quantization_config
        packing = None if stored is None else Packing.of(stored)
        optional: frozenset[str] = frozenset()
        if config.tie_word_embeddings:
            optional = frozenset({cls.head_name()})
        return Manifest(cls.checkpoint_shapes(config), optional, packing)

    def _expected_here(self, model_config: ModelConfig) -> Manifest:
        """Return the manifest of the tensors that vLLM's loader passes to this rank."""
        manifest = self.manifest(model_config)
        parallel = self.vllm_config.parallel_config
        if not (parallel.enable_expert_parallel and parallel.enable_ep_weight_filter):
            return manifest
        # The loader then does not read the experts of other ranks.
        experts = {name for name in manifest.shapes if ".mlp.experts." in name}
        return replace(manifest, optional=manifest.optional | experts)

    @classmethod
    def read_adapter(cls, vllm_config: VllmConfig) -> lora.LoraAdapter | None:
        """Read the adapter of `lora_path` and check it against this model.

        Returns None if there is no `lora_path`; raises ValueError if the adapter does not fit.
        """
        path = get_decode_config(vllm_config).lora_path
        if path is None:
            return None
        model_config = vllm_config.model_config
        needed = cls.manifest(model_config).shapes
        return lora.read_adapter(path, model_config, needed)

    def check_adapter(self, name: str, path: str) -> None:
        """Raise ValueError if requests cannot choose the adapter in `path` by `name`."""
        model_config = self.vllm_config.model_config
        needed = self.manifest(model_config).shapes
        adapter = lora.read_adapter(path, model_config, needed)
        lora.check_layers_alone(adapter)
        method = get_decode_config(self.vllm_config).method
        lora.check_strategy(adapter, name, method)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Compute logits: [rows, hidden] -> [rows, vocab]; None on ranks that do not gather.

        With `vocab_parallel` the columns are this rank's share of the LM head, padding included.
        """
        if hidden_states.shape[0] == 0:
            # A prefill step needs no logits, and vLLM's CPU gather fails on an empty tensor.
            width = self.config.vocab_size
            if self.keeps_columns:
                width = self.lm_head.num_embeddings_per_partition
            return hidden_states.new_empty((0, width))
        if self.keeps_columns:
            process = self.logits_processor
            logits: Tensor = process(self.lm_head, hidden_states, skip_gather=True)
            return logits
        return super().compute_logits(hidden_states)  # type: ignore[misc]

    def check_packing(self) -> None:
        """Raise ValueError if new weights cannot be packed as those were that are served."""
        model_config = self.vllm_config.model_config
        packing = self.manifest(model_config).packing
        if (packing or model_config.quantization) and current_platform.is_cpu():
            raise ValueError(
                "Quantised weights cannot be updated in place on CPUs, where vLLM packs them "
                "once, at load: start the engine again."
            )
        if stores_experts(model_config):
            # vLLM counts some tensors of experts twice, and then leaves the last scales out.
            raise ValueError(
                "Weights of experts that are stored "
                "quantised cannot be updated in place: "
                "start the engine again."
            )

    def new_update(self, backend: str) -> WeightUpdate:
        """Return what checks an update of the weights that `backend` of vLLM brings."""
        config = get_decode_config(self.vllm_config)
        self.check_packing()
        check_updatable(config.lora_path, config.merged_updates)
        manifest = self._expected_here(self.vllm_config.model_config)
        return WeightUpdate(manifest, partial=backend in PARTIAL_BACKENDS)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load full tensors by checkpoint names; return the names of the filled parameters.

        Raises ValueError with the name of a missing, surplus or mis-shaped weight, or of a damaged
        file. Within an update a call brings a part, and :class:`WeightUpdate` sees what is missing.
        """
        check = self._whole if self.update is None else self.update.part
        weights = check(weights)
        if self.rename is not None:
            weights = self.rename.apply(weights)
        return super().load_weights(weights)  # type: ignore[misc]

    def _whole(self, weights: Weights) -> Weights:
        """Check the checkpoint that vLLM's loader reads, and merge the adapter into it."""
        model_config = self.vllm_config.model_config
        weights = readable(weights, folder_of(self.vllm_config))
        weights = checked(weights, self._expected_here(model_config))
        # Again: kept, it would take 100 MB at 8B.
        adapter = self.read_adapter(self.vllm_config)
        return weights if adapter is None else lora.merge(weights, adapter)
