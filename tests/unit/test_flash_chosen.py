"""When FlashAttention is taken, its version, and its refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flash_configs import FLASH, TRITON, config_with_graphs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dllm_plugin.attention import backends as choice
from dllm_plugin.attention import registry
from dllm_plugin.attention.cascade import cascade_from
from dllm_plugin.attention.flash import (
    SegmentFlashBackend,
    SegmentFlashBuilder,
)
from dllm_plugin.engine.config_hook import _warn_of_clipped_keys


@pytest.fixture
def engine_config(checkpoints: Path) -> VllmConfig:
    return config_with_graphs(checkpoints)


def test_where_a_cascade_is_taken(
    engine_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 3, one query head per KV head, two blocks, and no reason against it."""
    model, given = engine_config.model_config, engine_config.additional_config
    attention, options, text = (
        engine_config.attention_config,
        given["dllm"],
        model.hf_text_config,
    )

    def taken(version: int | None = 3) -> bool:
        return bool(cascade_from(engine_config, version))

    def in_blocks(block: int, canvas: int) -> dict[str, Any]:
        defaults = options["defaults"] | {"block_length": block}
        return options | {"defaults": defaults, "canvas_length": canvas}

    def heads_per_key(number: int) -> None:
        text.num_attention_heads = number * text.num_key_value_heads
        model.model_arch_config.total_num_attention_heads = text.num_attention_heads

    attention.backend = FLASH
    engine_config.scheduler_config.max_num_seqs = 1024
    heads_per_key(1)
    assert taken() and not taken(2) and not taken(None)
    for backend in (TRITON, None):
        attention.backend = backend
        assert not taken()
    attention.backend = FLASH
    heads_per_key(2)
    assert not taken()
    heads_per_key(1)
    for different in (
        {"canvas_length": options["defaults"]["block_length"]},
        # Shifted on an absolute grid, its blocks commit in forwards of their own.
        {"architecture": "Fast_dLLM_QwenForCausalLM"},
    ):
        given["dllm"] = options | different
        assert not taken()
    given["dllm"] = options
    engine_config.cache_config.cache_dtype = "fp8"
    assert not taken()
    engine_config.cache_config.cache_dtype = "auto"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not taken()
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    text.sliding_window = 64
    assert not taken()
    text.sliding_window = None
    assert taken()
    # As many numbers per position as LLaDA-8B's 32 heads have: benchmarks/reports/attention.md.
    text.head_dim = 4096 // model.get_num_kv_heads(engine_config.parallel_config)
    model.model_arch_config.head_size = text.head_dim
    for block, blocks, fewest in (
        (16, 2, 9),
        (32, 2, 27),
        (32, 4, 4),
        (32, 8, 2),
        (64, 2, None),
    ):
        given["dllm"] = in_blocks(block, block * blocks)
        found = cascade_from(engine_config, 3)
        assert found == ({} if fewest is None else {block * blocks: fewest})
    engine_config.scheduler_config.max_num_seqs = 1
    given["dllm"] = in_blocks(32, 256)
    assert not cascade_from(engine_config, 3)


def test_version_3_is_the_default(engine_config: VllmConfig) -> None:
    assert choice.backend_under_full_graphs(engine_config, 3) == FLASH
    for version in (2, 4, None):
        assert choice.backend_under_full_graphs(engine_config, version) == TRITON


@pytest.mark.parametrize(
    ("cache", "dtype", "head_size", "version", "problem"),
    [
        ("fp8", torch.bfloat16, 64, 3, None),
        ("fp8_e4m3", torch.bfloat16, 80, 3, None),
        ("fp8_e5m2", torch.bfloat16, 64, 3, "fp8 and fp8_e4m3, got fp8_e5m2"),
        ("fp8_per_token_head", torch.bfloat16, 64, 3, "got fp8_per_token_head"),
        ("int8_per_token_head", torch.bfloat16, 64, 3, "got int8_per_token_head"),
        ("fp8", torch.bfloat16, 64, 2, "but vLLM finds FlashAttention 2"),
        ("fp8", torch.float16, 64, 3, "of bfloat16 models, got dtype float16"),
        ("fp8", torch.bfloat16, 72, 3, "multiple of 16, but this model's have 72"),
    ],
)
def test_float8_keys(
    cache: Any,
    dtype: torch.dtype,
    head_size: int,
    version: int,
    problem: str | None,
    engine_config: VllmConfig,
) -> None:
    """Also if a checkpoint asks for them: vLLM writes that into the same option."""
    model = engine_config.model_config
    engine_config.cache_config.cache_dtype, model.dtype = cache, dtype
    model.hf_text_config.head_dim = head_size
    model.model_arch_config.head_size = head_size
    taken = choice.backend_under_full_graphs(engine_config, version)
    assert taken == (TRITON if problem else FLASH)
    engine_config.attention_config.backend = FLASH
    if problem is None:
        assert choice.backend_under_full_graphs(engine_config, version) == FLASH
        return
    with pytest.raises(ValueError, match=f"{problem}.* choose TRITON_ATTN"):
        choice.backend_under_full_graphs(engine_config, version)


@pytest.mark.parametrize(
    ("cache", "backend", "given", "splits"),
    [
        ("fp8", FLASH, 32, 1),
        ("fp8_e4m3", FLASH, 32, 1),
        ("fp8", FLASH, 16, 16),
        ("fp8", TRITON, 32, 32),
        ("auto", FLASH, 32, 32),
    ],
)
def test_contexts_of_float8_keys_are_not_split(
    cache: Any,
    backend: AttentionBackendEnum,
    given: int,
    splits: int,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the user sets another number than vLLM's own, 32."""
    config = config_with_graphs(checkpoints)
    attention = config.attention_config
    config.cache_config.cache_dtype = cache
    attention.backend = backend
    attention.flash_attn_max_num_splits_for_cuda_graph = given
    monkeypatch.setattr(choice, "can_capture", lambda config: True)
    monkeypatch.setattr(choice, "flash_version", lambda config: 3)
    for _ in range(2):
        choice.set_graph_backend(config)
    assert attention.flash_attn_max_num_splits_for_cuda_graph == splits


@pytest.mark.parametrize(
    ("name", "cache", "scheme", "warned"),
    [
        ("dream", "fp8", None, True),
        ("fast-dllm-v2", "fp8_e4m3", None, True),
        ("wedlm-qwen2", "fp8", None, True),
        ("wedlm", "fp8", None, False),
        ("llada", "fp8", None, False),
        ("dream", "auto", None, False),
        ("dream", "fp8_e5m2", None, False),
        ("dream", "fp8", {"type": "float"}, False),
    ],
)
def test_large_keys_of_qwen2(
    name: str,
    cache: Any,
    scheme: dict[str, str] | None,
    warned: bool,
    checkpoints: Path,
    logged: list[str],
) -> None:
    """Without scales keys are clipped at 448; checkpoints may bring scales."""
    config = EngineArgs(str(checkpoints / f"tiny-{name}")).create_engine_config()
    config.cache_config.cache_dtype = cache
    arch = config.model_config.model_arch_config
    arch.quantization_config = scheme and {"kv_cache_scheme": scheme}
    logged.clear()
    _warn_of_clipped_keys(config)
    assert [text for text in logged if "clips keys above 448" in text] == logged
    assert bool(logged) == warned


def test_models_that_store_blocks_causally(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton attends by two masks, and FlashAttention 3 if it is asked for."""
    arguments = EngineArgs(str(checkpoints / "tiny-nemotron"), dtype="bfloat16")
    config = arguments.create_engine_config()
    attention = config.attention_config
    assert attention.backend is None
    monkeypatch.setattr(choice.current_platform, "is_cuda", lambda: True)
    for version, asked, taken in (
        (3, None, TRITON),
        (2, None, TRITON),
        (3, TRITON, TRITON),
        (3, FLASH, FLASH),
    ):
        monkeypatch.setattr(choice, "flash_version", lambda config, v=version: v)
        attention.backend = asked
        choice.set_causal_backend(config)
        assert attention.backend == taken
    attention.backend = AttentionBackendEnum.FLEX_ATTENTION
    with pytest.raises(ValueError, match="FLEX_ATTENTION cannot mix causal and"):
        choice.set_causal_backend(config)
    for version in (2, 4, None):
        monkeypatch.setattr(choice, "flash_version", lambda config, v=version: v)
        attention.backend = FLASH
        with pytest.raises(ValueError, match="or FLASH_ATTN for all layers if it"):
            choice.set_causal_backend(config)


def test_no_version_without_a_gpu(engine_config: VllmConfig) -> None:
    """A version that was asked for may not be there."""
    attention = engine_config.attention_config
    attention.flash_attn_version = 3
    for attention.backend in (None, TRITON, FLASH):
        assert choice.flash_version(engine_config) is None


def test_a_backend_for_one_kind_of_layers_keeps_the_others_as_they_were(
    engine_config: VllmConfig,
) -> None:
    engine_config.attention_config.backend_per_kind = {"full_attention": TRITON}
    assert choice.backend_under_full_graphs(engine_config, 3) == TRITON


def test_what_was_asked_for_is_taken_or_refused(engine_config: VllmConfig) -> None:
    attention, model = engine_config.attention_config, engine_config.model_config
    for asked in (TRITON, AttentionBackendEnum.FLASHINFER, FLASH):
        attention.backend = asked
        for version in (2, 3):
            taken = choice.backend_under_full_graphs(engine_config, version)
            assert taken == asked
    for version, found in ((4, "FlashAttention 4"), (None, "none")):
        with pytest.raises(
            ValueError, match=f"vLLM finds {found} for this .* cudagraph_mode to"
        ):
            choice.backend_under_full_graphs(engine_config, version)
    model.dtype = torch.float32
    with pytest.raises(
        ValueError, match="attention_backend FLASH_ATTN .* got dtype float32: choo"
    ):
        choice.backend_under_full_graphs(engine_config, 3)
    model.dtype, attention.backend = torch.bfloat16, None
    attention.backend_per_kind = {"full_attention": FLASH}
    with pytest.raises(
        ValueError, match="for one kind of layers: ask for it by attention_backend"
    ):
        choice.backend_under_full_graphs(engine_config, 3)


@pytest.mark.parametrize("head_size", [20, 288])
def test_heads_that_it_cannot_take(head_size: int, engine_config: VllmConfig) -> None:
    engine_config.model_config.hf_text_config.head_dim = head_size
    engine_config.model_config.model_arch_config.head_size = head_size
    engine_config.attention_config.backend = FLASH
    with pytest.raises(
        ValueError, match=f"but this model's have {head_size}: choose TRITON_ATTN"
    ):
        choice.backend_under_full_graphs(engine_config, 3)
    engine_config.attention_config.backend = None
    assert choice.backend_under_full_graphs(engine_config, 3) == TRITON


def test_the_registered_path_names_the_backend() -> None:
    backend = SegmentFlashBackend
    assert f"{backend.__module__}.{backend.__qualname__}" == registry.FLASH
    assert (backend.get_builder_cls(), backend.get_name()) == (
        SegmentFlashBuilder,
        FLASH.name,
    )
