"""Engines that cannot take adapters of requests say so at the start."""

from pathlib import Path
from typing import Any

import pytest
from quantised import quantise
from trained_adapters import write_adapter

from dllm_plugin.decoding.methods import METHODS
from dllm_plugin.models.checkpoints import lora
from dllm_plugin.models.checkpoints.lora import check_strategy

pytestmark = pytest.mark.usefixtures("registered")


def refusal(model: Path, **options: Any) -> str:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError) as caught:
        EngineArgs(str(model), enable_lora=True, **options).create_engine_config()
    return str(caught.value)


def test_a_merged_adapter(checkpoints: Path, tmp_path: Path) -> None:
    path = str(
        write_adapter(tmp_path / "adapter", checkpoints / "tiny-llada", ["q_proj"])
    )
    found = refusal(
        checkpoints / "tiny-llada", additional_config={"dllm": {"lora_path": path}}
    )
    assert f"enable_lora cannot be combined with lora_path '{path}'" in found


def test_a_quantised_base(checkpoint: Any) -> None:
    model = quantise(checkpoint("tiny-sdar"), "tiny-sdar", "int")
    found = refusal(model)
    assert (
        "enable_lora needs unquantised weights, got quantization 'compressed-tensors'"
        in found
    )


@pytest.mark.parametrize("name", ["tiny-sdar-moe", "tiny-llada2.0"])
def test_mixtures_on_cpus(checkpoints: Path, name: str) -> None:
    found = refusal(checkpoints / name)
    assert "needs a GPU: under it vLLM computes experts by Triton kernels only" in found


@pytest.mark.parametrize(
    ("folder", "name", "said"),
    [
        ("D2F_Dream_Base_7B_Lora", "math", True),
        ("adapter", "my-d2f", True),
        ("adapter", "math", False),
        ("md2fish", "math", False),
    ],
)
def test_names_that_say_d2f(
    checkpoints: Path, tmp_path: Path, folder: str, name: str, said: bool
) -> None:
    path = write_adapter(tmp_path / folder, checkpoints / "tiny-dream", ["q_proj"])
    adapter = lora.load_adapter(path)
    check_strategy(adapter, name, METHODS["d2f", "dream"])
    if not said:
        check_strategy(adapter, name, METHODS["dual_cache", "dream"])
        return
    with pytest.raises(
        ValueError, match=f"'{name}' was trained for the strategy 'd2f'"
    ):
        check_strategy(adapter, name, METHODS["dual_cache", "dream"])
