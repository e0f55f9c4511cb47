"""What a mixture of experts would ignore, or answer by its neighbours, is refused by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.utils.import_utils import resolve_obj_by_qualname

import dllm_plugin
from dllm_plugin.config.quantisation import REBALANCED, refuse_for_mixtures
from dllm_plugin.models import ARCHITECTURES

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "checkpoints"
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(
    weights: str, inputs: str | None, dynamic: bool = True, **rest: Any
) -> Any:
    """As llm-compressor writes it: its FP8_DYNAMIC is channel and token."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    stored = kind | {"strategy": weights, "dynamic": False, "observer": "minmax"}
    moving = kind | {"strategy": inputs, "dynamic": dynamic}
    group = {
        "targets": rest.pop("targets", ["Linear"]),
        "weights": stored
        | ({"block_structure": [128, 128]} if weights == "block" else {}),
        "input_activations": inputs
        and moving | ({"group_size": 128} if inputs == "group" else {}),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    } | rest


PLAIN_EXPERTS = ["lm_head", "re:.*mlp.*"]
# Model, vLLM's arguments, what config.json says of its weights, and whether that is refused.
QUANTISED: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("sdar-moe", {"quantization": "fp8_per_tensor"}, {}, True),
    ("llada2.0", {"quantization": "fp8_per_tensor"}, {}, True),
    ("sdar-moe", {"quantization_config": {"moe": "fp8_per_tensor"}}, {}, True),
    (
        "sdar-moe",
        {"quantization_config": {"targets": {"*": "fp8_per_tensor"}}},
        {},
        True,
    ),
    ("sdar-moe", {}, TENSOR, True),
    ("sdar-moe", {}, TENSOR | {"activation_scheme": "static"}, False),
    ("sdar-moe", {}, TENSOR | {"weight_block_size": [128, 128]}, False),
    ("sdar-moe", {}, compressed("tensor", "tensor"), True),
    ("llada2.0", {}, compressed("tensor", "tensor"), True),
    ("llada2.1", {}, compressed("tensor", "tensor", targets=["re:.*experts.*"]), True),
    ("sdar-moe", {}, compressed("tensor", "tensor", targets=["RoutedExperts"]), True),
    (
        "sdar-moe",
        {},
        compressed("tensor", "tensor", quant_method="compressed_tensors"),
        True,
    ),
    ("sdar-moe", {}, compressed("tensor", "tensor", dynamic=False), False),
    ("sdar-moe", {}, compressed("tensor", None), False),
    ("sdar-moe", {}, compressed("tensor", "tensor", ignore=PLAIN_EXPERTS), False),
    (
        "sdar-moe",
        {},
        compressed("tensor", "tensor", targets=["re:.*self_attn.*"]),
        False,
    ),
    ("sdar-moe", {}, compressed("channel", "token"), False),
    ("llada2.0", {}, compressed("block", "group"), False),
    ("sdar", {}, compressed("tensor", "tensor"), False),
    ("sdar-moe", {"quantization": "fp8_per_channel"}, {}, False),
    ("sdar-moe", {"quantization": "fp8_per_block"}, {}, False),
    ("sdar-moe", {"quantization_config": {"linear": "fp8_per_tensor"}}, {}, False),
    ("sdar-moe", {}, {}, False),
    ("sdar", {"quantization": "fp8_per_tensor"}, {}, False),
    ("sdar", {}, TENSOR, False),
]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    dllm_plugin.register()


def config(path: Path, eplb: bool = False, **options: Any) -> VllmConfig:
    parallel: Any = SimpleNamespace(enable_eplb=eplb)
    given: Any = SimpleNamespace(
        model_config=ModelConfig(str(path), **options), parallel_config=parallel
    )
    return given


@pytest.mark.parametrize(("name", "options", "stored", "refused"), QUANTISED, ids=str)
def test_one_scale_for_all_rows(
    name: str,
    options: dict[str, Any],
    stored: dict[str, Any],
    refused: bool,
    tmp_path: Path,
) -> None:
    """Of a mixture alone: linear layers scale by row where the GPU has kernels for it."""
    path = CHECKPOINTS / f"tiny-{name}"
    if stored:
        path = Path(shutil.copytree(path, tmp_path / name))
        file = path / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"quantization_config": stored})
        )
    given = config(path, **options)
    if not refused:
        refuse_for_mixtures(given)
        return
    with pytest.raises(
        ValueError, match="one number for all rows of a step.* fp8_per_channel"
    ):
        refuse_for_mixtures(given)


def test_experts_that_cannot_move() -> None:
    """`enable_eplb` needs GPUs, so this asks the check itself."""
    assert "enable_eplb" in ParallelConfig.__dataclass_fields__
    refuse_for_mixtures(config(CHECKPOINTS / "tiny-sdar-moe", eplb=True))
    for name in ("llada2.0", "sdar", "llada"):
        with pytest.raises(
            ValueError, match="enable_eplb has no effect on .*: leave it out"
        ):
            refuse_for_mixtures(config(CHECKPOINTS / f"tiny-{name}", eplb=True))


def test_the_list_is_what_vllm_can() -> None:
    """vLLM's test needs an object: the protocol's methods and attributes of its model class."""
    rebalanced = {ARCHITECTURES[name] for name in REBALANCED}
    for path in ARCHITECTURES.values():
        model = resolve_obj_by_qualname(path.replace(":", "."))
        assert (MixtureOfExperts in model.__mro__) == (path in rebalanced), path
