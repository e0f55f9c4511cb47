"""How a KV cache layout is chosen, and that vLLM's registry is left as it was found."""

from pathlib import Path
from typing import Any

import pytest
import spans
import torch
from torch.nn.attention.flex_attention import flex_attention
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dllm_plugin.attention import backends as choice
from dllm_plugin.attention import registry
from dllm_plugin.attention.distinct import DistinctBackend, DistinctImpl
from dllm_plugin.attention.flex import SegmentFlexBuilder
from dllm_plugin.config.options import KV_CACHE_LAYOUTS
from dllm_plugin.kernels.paged_attention.reference import attend_spans

CUSTOM, CPU_ATTN = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN
SOMEONE = "somewhere.else.TheirBackend"


def test_every_layout_has_its_reason() -> None:
    assert tuple(choice.REASONS) == KV_CACHE_LAYOUTS


@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_the_registry_is_changed_while_a_model_is_built(layout: str) -> None:
    register_backend(CUSTOM, SOMEONE)
    try:
        with (
            pytest.raises(ZeroDivisionError),
            registry.registered(VllmConfig(), layout),
        ):
            ours = layout == "distinct"
            assert (CUSTOM.get_path() == registry.DISTINCT) == ours
            assert CPU_ATTN.is_overridden() == ours
            assert not ours or CPU_ATTN.get_class() is DistinctBackend
            raise ZeroDivisionError
        assert CUSTOM.get_path() == SOMEONE and not CPU_ATTN.is_overridden()
    finally:
        CUSTOM.clear_override()


def test_a_layer_with_another_backend_is_noticed(
    single_rank: None, checkpoints: Path
) -> None:
    """vLLM keeps answers; one that another plugin gave under the same name must not be used."""
    config = EngineArgs(
        str(checkpoints / "tiny-llada"), dtype="float32"
    ).create_engine_config()
    with (
        pytest.raises(
            ValueError, match="layer model.0 the attention backend CPUAttentionBackend"
        ),
        registry.registered(config, "distinct"),
        set_current_vllm_config(config),
    ):
        backend = CPU_ATTN.get_class()
        CPU_ATTN.clear_override()
        assert Attention(4, 64, 0.125, prefix="model.0").attn_backend is not backend


@pytest.mark.parametrize("asked", ["CPU_ATTN", "auto"])
def test_backends_that_a_cpu_runs(asked: str, checkpoints: Path) -> None:
    options = {"attention_backend": asked}
    config = EngineArgs(
        str(checkpoints / "tiny-llada"), **options
    ).create_engine_config()
    assert config.attention_config.backend in (None, CPU_ATTN)


@pytest.mark.parametrize(
    "asked", ["FLEX_ATTENTION", "TRITON_ATTN", "CUSTOM", "CPU_MLA"]
)
@pytest.mark.parametrize("per_kind", [False, True])
def test_backends_that_a_cpu_would_ignore(
    asked: str, per_kind: bool, checkpoints: Path
) -> None:
    options: dict[str, Any] = {"attention_backend": asked}
    if per_kind:
        options = {"attention_config": {"backend_per_kind": {"full_attention": asked}}}
    with pytest.raises(
        ValueError, match=f"{asked} is not for CPUs, where vLLM takes CPUAttention"
    ):
        EngineArgs(str(checkpoints / "tiny-llada"), **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sliding_window": 128}, "sliding windows"),
        ({"alibi_slopes": [0.5]}, "alibi slopes"),
        ({"logits_soft_cap": 30.0}, "logits soft caps"),
        ({"attn_type": "encoder_only"}, "encoder layers"),
        ({"kv_sharing_target_layer_name": "model.0"}, "KV sharing"),
        ({"sinks": [1.0]}, "sinks"),
        ({"kv_cache_dtype": "fp8"}, "quantised keys"),
    ],
)
def test_layers_that_it_cannot_serve(
    options: dict[str, Any], word: str, single_rank: None
) -> None:
    with pytest.raises(
        ValueError, match=f"does not support {word}; use kv_cache_layout 'unified'"
    ):
        DistinctImpl(4, 64, 0.125, 2, **options)
    assert DistinctImpl(4, 64, 0.125, 2).num_kv_heads == 2


def test_preferred_pages_hold_whole_tiles() -> None:
    wishes = {16: 64, 64: 64, 80: 128, 128: 128, 256: 256}
    assert {n: DistinctBackend.get_preferred_block_size(n) for n in wishes} == wishes


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # torch: not compiled; that is what we want
def test_flex_attention_takes_more_sequences_than_requests(checkpoints: Path) -> None:
    """vLLM's own metadata, one sequence per segment, gives what the reference gives."""
    config = EngineArgs(
        str(checkpoints / "tiny-llada"), dtype="float32"
    ).create_engine_config()
    page, heads, head, group = 16, 2, 32, 2
    arguments, constants = spans.build(
        spans.Spans([13, 11], [20, 3], heads, group, head, page, spans.absolute_grid)
    )
    (
        query,
        key,
        value,
        key_cache,
        value_cache,
        bounds,
        start,
        seen,
        table,
        scale,
        out,
    ) = arguments
    attend_spans(*arguments, **constants)
    pages = len(key_cache) + 1
    config.scheduler_config.max_num_seqs, config.cache_config.num_gpu_blocks = 2, pages
    spec = FullAttentionSpec(
        block_size=page, num_kv_heads=heads, head_size=head, dtype=torch.float32
    )
    builder = SegmentFlexBuilder(spec, ["x"], config, torch.device("cpu"))
    # The same keys in vLLM's order, page 0 unused as in vLLM, the spans' own among them.
    table = (table + 1).clamp_max(pages - 1)
    flat = torch.zeros(2, pages * page, heads, head)
    flat[0, page:] = (
        key_cache.permute(0, 3, 1, 2, 4).reshape(-1, heads, head).nan_to_num()
    )
    flat[1, page:] = (
        value_cache.permute(0, 3, 1, 2).reshape(-1, heads, head).nan_to_num()
    )
    for r in range(2):
        at = start[r] + torch.arange(bounds[r + 1] - bounds[r])
        slots = table[r, at // page].long() * page + at % page
        flat[0, slots], flat[1, slots] = (
            key[bounds[r] : bounds[r + 1]],
            value[bounds[r] : bounds[r + 1]],
        )
    starts = torch.cat(
        [torch.tensor([0]), (seen.diff() != 0).nonzero()[:, 0] + 1]
    ).int()
    start_loc = torch.cat([starts, torch.tensor([24])]).int()
    request = torch.searchsorted(bounds[1:], starts, right=True)
    common = CommonAttentionMetadata(
        query_start_loc=start_loc,
        query_start_loc_cpu=start_loc,
        seq_lens=seen[starts.long()],
        num_reqs=len(starts),
        num_actual_tokens=24,
        max_query_len=spans.BLOCK,
        max_seq_len=64,
        block_table_tensor=table[request],
        slot_mapping=torch.zeros(24, dtype=torch.int64),
        causal=False,
    )
    assert len(starts) > config.scheduler_config.max_num_seqs
    metadata = builder.build(0, common)
    q, k, v = (t[None].transpose(1, 2) for t in (query, *flat))
    got = flex_attention(q, k, v, None, metadata.block_mask, scale, enable_gqa=True)
    torch.testing.assert_close(got[0].transpose(0, 1), out, atol=2e-6, rtol=0)
