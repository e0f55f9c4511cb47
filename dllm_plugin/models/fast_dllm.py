"""Fast-dLLM v2: a Qwen2, at 1.5B with tied embeddings, whose row i predicts position i + 1."""

from typing import Any, ClassVar

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from dllm_plugin.models.base import DiffusionModel
from dllm_plugin.models.checkpoints import shapes
from dllm_plugin.models.checkpoints.weights import Shapes


class FastDLLMQwenForCausalLM(DiffusionModel, Qwen2ForCausalLM):
    """Efficient-Large-Model/Fast_dLLM_v2_7B, _1.5B and checkpoints of their layout."""

    logits_shift: ClassVar[bool] = True

    @classmethod
    def checkpoint_shapes(cls, config: Any) -> Shapes:
        return shapes.qwen2(config)
