"""What `auto` becomes on each kind of CPU, and that a dtype of the user's own stays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_plugin.config.cpu_dtype import (
    NO_UNITS,
    DtypeChoice,
    Memory,
    choose_dtype,
    multiplies_bf16,
    per_node,
)
from dllm_plugin.engine.auto_dtype import REASON, OpenDtype

GIB = 1 << 30
AVX2 = {"avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx10_2": False}
AVX512_BF16 = AVX2 | {"avx512_bf16": True}
ARM = {"neon": True, "bf16": False, "sve_bf16": False}
HALF = Memory(total=16 * GIB, share=0.5, kv_asked=None, kv_least=GIB)


@pytest.mark.parametrize(
    ("capabilities", "limit", "native"),
    [
        (AVX2, None, False),
        (AVX2 | {"avx_ne_convert": True, "avx512_f": True}, None, False),
        (AVX512_BF16, None, True),
        (AVX2 | {"amx_bf16": True}, None, True),
        (AVX2 | {"avx10_2": True}, None, True),
        (AVX512_BF16, "AVX2", False),
        (AVX512_BF16, "avx512_core_vnni", False),
        (AVX512_BF16, "AVX512_CORE_BF16", True),
        (AVX512_BF16, "DEFAULT", True),
        (AVX512_BF16, "", True),
        (ARM, None, False),
        (ARM | {"bf16": True}, None, True),
        (ARM | {"sve_bf16": True}, None, True),
        ({"architecture": "riscv64"}, None, True),
        ({"architecture": "riscv64"}, "AVX2", True),
    ],
)
def test_which_cpus_multiply_bfloat16(
    capabilities: dict[str, Any], limit: str | None, native: bool
) -> None:
    assert multiplies_bf16(capabilities, limit) is native


@pytest.mark.parametrize(
    ("weights", "kv_asked", "fits"),
    [
        (7 * GIB, None, True),
        (7 * GIB + 1, None, False),
        (8 * GIB, 8 * GIB, True),  # what was asked for lies outside of the share
        (8 * GIB, 8 * GIB + 1, False),
        (8 * GIB + 1, GIB, False),
        (0, 16 * GIB + 1, False),
    ],
)
def test_what_fits(weights: int, kv_asked: int | None, fits: bool) -> None:
    memory = Memory(total=16 * GIB, share=0.5, kv_asked=kv_asked, kv_least=GIB)
    assert memory.holds(weights) is fits


@pytest.mark.parametrize(
    ("workers", "ranks", "nodes", "expected"),
    [
        (1, 1, 1, 100),
        (2, 2, 1, 100),
        (2, 2, 2, 50),
        (4, 2, 2, 100),
        (3, 3, 2, 68),
        (1, 1, 4, 100),
    ],
)
def test_bytes_of_the_fullest_node(
    workers: int, ranks: int, nodes: int, expected: int
) -> None:
    assert per_node(100, workers, ranks, nodes) == expected


def choice(fixed_by: str | None = None, weights: int | None = GIB) -> DtypeChoice:
    return choose_dtype(torch.bfloat16, fixed_by, weights, HALF)


def test_float32_if_it_fits() -> None:
    found = choice()
    assert (found.dtype, found.reason) == (torch.float32, NO_UNITS)
    assert (
        found.line.startswith("dtype is float32: ") and "--dtype bfloat16" in found.line
    )


@pytest.mark.parametrize(
    ("made", "reason", "words"),
    [
        (
            {"weights": 9 * GIB},
            "float32 does not fit",
            "9.0 GiB beside a KV cache of 1.0",
        ),
        (
            {"weights": 9 * GIB},
            "float32 does not fit",
            "use 0.5 of 16.0 (gpu_memory_utilization)",
        ),
        (
            {"weights": None},
            "its size is not known",
            "the size of the weights is not known",
        ),
        (
            {"fixed_by": "its weights are quantised"},
            "its weights are quantised",
            "(its weights",
        ),
    ],
)
def test_else_the_checkpoints_with_its_cost(made: Any, reason: str, words: str) -> None:
    found = choice(**made)
    assert found.dtype == torch.bfloat16 and found.reason.startswith(reason)
    assert found.line.startswith("dtype stays bfloat16 ")
    assert (
        words in found.line
        and "52 against 11.4 ms" in found.line
        and "\n" not in found.line
    )


def test_the_mark_passes_for_the_dtype() -> None:
    mark = OpenDtype(torch.bfloat16, None)
    assert mark == torch.bfloat16 and mark == OpenDtype(torch.bfloat16, "x")
    assert mark != torch.float32 and mark in [torch.float16, torch.bfloat16]
    assert mark not in [torch.float16] and str(mark) == "torch.bfloat16"
    assert {torch.bfloat16: 1}[mark] == 1  # type: ignore[index]


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose oneDNN may use AVX2 at most; what it has read already does not change."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


KEPT = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("stored", [*KEPT, None])
def test_auto_becomes_float32(
    avx2: None,
    vllm_config_for: Callable[..., Any],
    checkpoint: Callable[..., Path],
    stored: Any,
) -> None:
    model = checkpoint("tiny-llada", torch_dtype=stored)
    config = vllm_config_for(model, dtype="auto")
    assert config.model_config.dtype == torch.float32
    assert config.additional_config[REASON] == NO_UNITS
    assert config.model_config.hf_config.dtype == KEPT.get(stored)


def test_native_units_change_nothing(
    vllm_config_for: Callable[..., Any],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    model = checkpoint("tiny-llada", torch_dtype="bfloat16")
    config = vllm_config_for(model, dtype="auto")
    assert config.model_config.dtype == torch.bfloat16
    assert REASON not in config.additional_config


@pytest.mark.parametrize("dtype", [*KEPT, "half", torch.bfloat16])
def test_a_dtype_of_the_user_stays(
    avx2: None,
    vllm_config_for: Callable[..., Any],
    checkpoint: Callable[..., Path],
    dtype: Any,
) -> None:
    model = checkpoint("tiny-dream", torch_dtype="bfloat16")
    config = vllm_config_for(model, dtype=dtype)
    assert config.model_config.dtype == KEPT.get(
        dtype, {"half": torch.float16}.get(dtype, dtype)
    )
    assert REASON not in config.additional_config
    assert config.model_config.hf_config.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", KEPT)
def test_too_little_memory_keeps_what_vllm_takes(
    avx2: None,
    vllm_config_for: Callable[..., Any],
    checkpoint: Callable[..., Path],
    stored: Any,
) -> None:
    model = checkpoint("tiny-llada", torch_dtype=stored)
    config = vllm_config_for(model, dtype="auto", kv_cache_memory_bytes=1 << 60)
    # Of float32, vLLM's own `auto` makes the dtype that it prefers.
    assert (
        config.model_config.dtype == KEPT["bfloat16" if stored == "float32" else stored]
    )
    assert config.additional_config[REASON].startswith(
        "float32 does not fit, and this CPU"
    )


def test_a_checkpoint_without_readable_shapes_keeps_its_dtype(
    avx2: None, vllm_config_for: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("tiny-llada", torch_dtype="bfloat16")
    for path in model.glob("*.safetensors"):
        path.unlink()
    config = vllm_config_for(model, dtype="auto", load_format="dummy")
    assert config.model_config.dtype == torch.bfloat16
    assert config.additional_config[REASON].startswith("its size is not known")


def test_other_architectures_are_left_alone(
    avx2: None, vllm_config_for: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    """Also under a model type of ours: our hook would not be called to take the mark out."""
    model = checkpoint(
        "tiny-sdar", architectures=["Qwen3ForCausalLM"], torch_dtype="bfloat16"
    )
    assert json.loads((model / "config.json").read_text())["model_type"] == "sdar"
    assert vllm_config_for(model, dtype="auto").model_config.dtype == torch.bfloat16


CODE = """
import transformers


class Model(transformers.PreTrainedModel):
    config_class = transformers.PreTrainedConfig
    _supports_attention_backend = True
"""


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_no_model_of_ours_is_decoded_from_left_to_right(
    dtype: str,
    avx2: None,
    vllm_config_for: Callable[..., Any],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Under `auto` nothing took the mark out, and the engine did not start."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf")
    )
    model = checkpoint("tiny-sdar", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (model / "modeling.py").write_text(CODE)
    options = {"dtype": dtype, "model_impl": "transformers", "trust_remote_code": True}
    with pytest.raises(
        ValueError, match="model_impl 'transformers' would decode SDARForCausalLM"
    ):
        vllm_config_for(model, **options)
