"""Apply an adapter to the draft rows of a forward only."""

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from dllm_plugin.models.checkpoints.lora import (
    LoraAdapter,
    LoraPair,
    adapter_folder,
    check_base,
    check_coverage,
    load_adapter,
)
from dllm_plugin.models.checkpoints.weights import Shapes

TARGET = "o_proj"  # the only module that is not packed with others


def read_draft_adapter(
    path: str, model_config: ModelConfig, shapes: Shapes
) -> LoraAdapter:
    """Read a draft adapter; raise ValueError unless all of it fits this model."""
    adapter = load_adapter(adapter_folder(path))
    if adapter.targets != (TARGET,):
        raise ValueError(
            f"draft_adapter '{path}' targets {list(adapter.targets)}; only ['{TARGET}'] can be "
            "applied to draft rows alone."
        )
    if adapter.base_name:
        config = model_config.hf_config
        names = (model_config.model, config._name_or_path, config.source_name)
        check_base(adapter, names)
    check_coverage(adapter, shapes)
    return adapter


class DraftProjection(nn.Module):
    """Add a low-rank update to a row-parallel projection, in draft rows only.

    rows_T1  ``[tokens, 1]`` in the dtype of the weights, 1 in draft rows and else 0
    """

    a: Tensor
    b: Tensor
    rows_T1: Tensor

    def __init__(self, inner: nn.Module, pair: LoraPair, rows_T1: Tensor) -> None:
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


def draft_rows(vllm_config: VllmConfig, like: Tensor) -> Tensor:
    """Return the buffer that marks draft rows, for the largest forward."""
    most = vllm_config.scheduler_config.max_num_batched_tokens
    return torch.zeros(most, 1, dtype=like.dtype, device=like.device)
