"""One forward of a loaded model through vLLM's own attention, without an engine."""

from typing import Any

import torch


def forward(model: Any, tokens: list[int], stops: list[int]) -> torch.Tensor:
    """Logits ``[T, V]``; the run of tokens that ends at a stop sees all keys before that stop."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    config, total = model.vllm_config, len(tokens)
    context = (
        config.compilation_config.static_forward_context
    )  # experts are listed there too
    layers = {name: layer for name, layer in context.items() if name.endswith(".attn")}
    first = next(iter(layers.values()))
    spec, backend = first.get_kv_cache_spec(config), first.attn_backend
    pages = -(-total // spec.block_size)
    starts = torch.tensor([0, *stops], dtype=torch.int32)
    slots = torch.arange(total)
    for layer in layers.values():
        layer.kv_cache = torch.zeros(
            pages,
            spec.num_kv_heads,
            spec.block_size,
            2 * spec.head_size,
            dtype=spec.dtype,
        )
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts[1:].clone(),
        num_reqs=len(stops),
        num_actual_tokens=total,
        max_query_len=int(starts.diff().max()),
        max_seq_len=total,
        block_table_tensor=torch.arange(pages, dtype=torch.int32).repeat(len(stops), 1),
        slot_mapping=slots,
        causal=False,
    )
    with set_current_vllm_config(config), torch.inference_mode():
        builder = backend.get_builder_cls()(
            spec, list(layers), config, torch.device("cpu")
        )
        metadata = builder.build(0, common)
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            config,
            num_tokens=total,
            slot_mapping=dict.fromkeys(layers, slots),
        ):
            return model.compute_logits(
                model(torch.tensor(tokens), torch.arange(total))
            )
