"""Rotary positions that FlashAttention's backend applies, instead of the layer before it.

There they come with the store of keys and values in one kernel (:mod:`kernels.rotated_store`).
"""

from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class Deferred(nn.Module):
    """In the place of a rotation; it stays a part of the model, whose buffers may be moved."""

    def __init__(self, rotation: RotaryEmbedding) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """As they are."""
        return query, key


def defer(model: nn.Module, backend: AttentionBackendEnum | None) -> None:
    """Hand the rotations of a model's layers to their attention, where both can have that.

    `backend`: what was selected; the libraries of others are left alone.
    """
    if backend != AttentionBackendEnum.FLASH_ATTN:
        return
    from dllm_plugin.attention.flash import PartsImpl, RotatingFlashBackend

    for layer in model.modules():
        if not isinstance(layer, LlamaAttention | Qwen2Attention):
            continue
        rotation, attention = layer.rotary_emb, layer.attn
        if isinstance(attention.impl, PartsImpl) and _is_plain(rotation, layer):
            attention.impl.rotation = rotation
            attention.attn_backend = RotatingFlashBackend
            layer.register_module("rotary_emb", Deferred(rotation))


def _is_plain(rotation: nn.Module, layer: LlamaAttention | Qwen2Attention) -> bool:
    """Whole heads by halves, and keys stored as they are."""
    return (
        type(rotation) is RotaryEmbedding
        and rotation.is_neox_style
        and rotation.rotary_dim == rotation.head_size == layer.head_dim
        and not is_quantized_kv_cache(layer.attn.kv_cache_dtype)
    )
