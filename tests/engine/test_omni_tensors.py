"""Non-autoregressive models in the engine, against the module called directly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineRoom

from dllm_plugin.omni import hidden_state_args, tensor_args, tensor_of

NAMES = ("sample", "forward", "diffuse")
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "additional_config": {}}


@pytest.fixture(scope="session")
def denoisers() -> Any:
    """The tiny models, which import vLLM."""
    import omni_denoisers

    omni_denoisers.register()
    return omni_denoisers


@pytest.fixture(scope="session")
def folders(
    tmp_path_factory: pytest.TempPathFactory, denoisers: Any
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("denoisers")
    return {name: denoisers.checkpoint(root / name, name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_eight_requests(
    room: EngineRoom, folders: dict[str, Path], denoisers: Any, name: str
) -> None:
    """Different seeds, steps and sizes in one batch; equal sizes are computed together."""
    llm = room.start(model=str(folders[name]), **OPTIONS, **tensor_args())
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert runner.model.name == name and runner.get_kv_cache_spec() == {}
    outputs = denoisers.run(llm)
    for output, wish in zip(outputs, denoisers.WISHES, strict=True):
        expected = denoisers.directly(runner.get_model(), name, wish)
        tensor = tensor_of(output)
        assert tensor.dtype == torch.float32 and tensor.shape == (wish[1]["tokens"], 64)
        assert (tensor - expected).abs().max() < 1e-5


def test_a_refused_request_leaves_its_neighbours(
    room: EngineRoom, folders: dict[str, Path], denoisers: Any
) -> None:
    llm = room.start(model=str(folders["diffuse"]), **OPTIONS, **tensor_args())
    wishes = [denoisers.WISHES[0], ([3, 4], {"steps": 1000}), denoisers.WISHES[3]]
    first, refused, last = denoisers.run(llm, wishes)
    with pytest.raises(ValueError, match="steps must lie between 1 and 100, got 1000"):
        tensor_of(refused)
    alone = denoisers.run(llm, denoisers.WISHES[:4])
    assert torch.equal(tensor_of(first), tensor_of(alone[0]))
    assert torch.equal(tensor_of(last), tensor_of(alone[3]))


def test_without_a_seed_the_noise_is_the_requests_own(
    room: EngineRoom, folders: dict[str, Path], denoisers: Any
) -> None:
    llm = room.start(model=str(folders["diffuse"]), **OPTIONS, **tensor_args())
    first, second = denoisers.run(llm, [([5, 6], {"steps": 2})] * 2)
    assert not torch.equal(tensor_of(first), tensor_of(second))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"worker_cls": tensor_args()["worker_cls"]},
            "runner='generate'; use 'pooling'",
        ),
        (
            hidden_state_args() | {"runner": "pooling"},
            "runner='pooling'; use 'generate'",
        ),
        (hidden_state_args() | {"scheduler_cls": None}, "HiddenStatesScheduler'"),
        (hidden_state_args() | {"logits_processors": None}, "HiddenStatesRules'"),
        (hidden_state_args([3, 1]), "layers 0 to 2, to be given in order"),
        (
            hidden_state_args() | {"kv_sharing_fast_prefill": True},
            "kv_sharing_fast_prefill",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_combinations_refused_at_start(
    room: EngineRoom, options: dict[str, Any], sentence: str
) -> None:
    """On a text model, whose engine never comes up."""
    checkpoints = Path(__file__).parents[1] / "goldens" / "checkpoints"
    settings = {"model": str(checkpoints / "tiny-llada"), "hf_overrides": as_llama}
    with pytest.raises(ValueError, match=sentence):
        room.start(**settings, **OPTIONS | {"load_format": "dummy"} | options)


def as_llama(config: Any) -> Any:
    """The sizes of a tiny checkpoint, with an architecture that writes from left to right."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=320,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    )
