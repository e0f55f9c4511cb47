"""Defer rotary positions from a model's layers to FlashAttention's backend.

The backend rotates queries and keys in the kernel that stores keys and values
(:mod:`dllm_plugin.kernels.rotate_and_store`), which saves a launch or two per layer, and more if
the cache is float8: the kernel converts queries, keys and values as well. This is done for LLaDA,
Dream and Fast-dLLM v2, which are built of vLLM's Llama and Qwen2 layers.

Learned from experience: the layers keep a rotation that does nothing, so the compiled forward of
such a model differs from vLLM's own. vLLM finds compiled forwards in its cache by the
configuration, so the number `TRACED` in :mod:`dllm_plugin.engine.config_hook` is part of that
configuration. It must be raised whenever what is traced changes.
"""

from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class Deferred(nn.Module):
    """Replace a rotation, and keep it in the model: vLLM moves the buffers of its modules."""

    def __init__(self, rotation: RotaryEmbedding) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys without rotating them."""
        return query, key


def defer(model: nn.Module, backend: AttentionBackendEnum | None) -> None:
    """Move the rotations of a model's layers into their attention, if both support it.

    `backend` was selected. Without FLASH_ATTN its module is not even imported,
    since importing it loads FlashAttention's libraries.
    """
    if backend != AttentionBackendEnum.FLASH_ATTN:
        return
    from .flash import RotatingFlashBackend, SegmentFlashImpl

    for layer in model.modules():
        if not isinstance(layer, LlamaAttention | Qwen2Attention):
            continue
        rotation, attention = layer.rotary_emb, layer.attn
        if isinstance(attention.impl, SegmentFlashImpl) and _is_supported(
            rotation, layer
        ):
            attention.impl.rotation = rotation
            attention.attn_backend = RotatingFlashBackend
            # Float8 queries are converted where they are rotated.
            attention.query_quant = None
            layer.register_module("rotary_emb", Deferred(rotation))


def _is_supported(rotation: nn.Module, layer: LlamaAttention | Qwen2Attention) -> bool:
    """Return whether whole heads are rotated by halves."""
    return (
        type(rotation) is RotaryEmbedding
        and rotation.is_neox_style
        and rotation.rotary_dim == rotation.head_size == layer.head_dim
    )
