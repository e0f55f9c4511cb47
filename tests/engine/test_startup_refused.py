"""Wrong configurations and files end the start with one sentence, in the caller's process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHECKPOINTS, EngineRoom
from jobs import MIXED, check
from safetensors.torch import load_file, save_file
from vllm.utils.cpu_resource_utils import get_visible_memory_node

from dllm_plugin.commands import cli

pytestmark = pytest.mark.slow

STAGES = {"pipeline_parallel_size": 2}
MIXTURE = {"model": str(CHECKPOINTS / "tiny-sdar-moe"), "dllm": {}}
FLOATING = {"strategy": "d2f", "adaptive": "throughput"}
WRONG_OPTIONS: list[tuple[Any, str]] = [
    (
        {"strategy": "diffuse"},
        "strategy 'diffuse' is unknown; choose one of: auto, d2f",
    ),
    ({"block_size": 8}, "Unknown dllm option 'block_size'; known options: "),
    ({"mask_token_id": 3}, "Unknown dllm option 'mask_token_id'"),
    ({"canvas_length": 512}, "canvas_length 512 is longer than the context of 256"),
    ({"canvas_length": 0}, "canvas_length must be a whole number of at least 1, got 0"),
    ({"block_length": 0}, "block_length must be a whole number of at least 1, got 0"),
    (
        {"block_length": 64, "canvas_length": 32},
        "block_length 64 is longer than the canvas of 32",
    ),
    ({"threshold": 1.5}, "threshold must be a number between 0.0 and 1.0, got 1.5"),
    ({"steps": 2.5}, "steps must be a whole number"),
    (
        {"strategy": "prefix_cache", "policy": "origin"},
        "policy 'origin' has no meaning",
    ),
    ({"strategy": "prefix_cache", "cfg_scale": 0.5}, "cfg_scale has no effect"),
    (
        {"strategy": "dual_cache", "max_active_blocks": 2},
        "max_active_blocks has no effect",
    ),
    (
        {"strategy": "block_diffusion", "block_add_threshold": 0.2},
        "block_add_threshold has no effect with max_active_blocks 1: remove it or raise",
    ),
    (
        {"strategy": "d2f", "commit_alone_from": 8},
        "commit_alone_from 8 needs the strategy 'block",
    ),
    (
        {"strategy": "block_diffusion", "commit_alone_from": 8, "max_active_blocks": 2},
        "commit_alone_from 8 needs the strategy 'block_diffusion', max_active_blocks 1 and a can",
    ),
    (
        {"strategy": "block_diffusion", "commit_alone_from": 8, "canvas_length": 40},
        "a canvas_length of two blocks at least: leave it out",
    ),
    (
        {"commit_alone_from": -1},
        "commit_alone_from must be a whole number of at least 0, got -1",
    ),
    ({"strategy": "dual_cache", "alg_temp": 0.5}, "alg_temp has no effect"),
    ({"logits_eos_inf": "no"}, "logits_eos_inf must be true or false, got 'no'"),
    (
        {"adaptive": "on"},
        "adaptive 'on' is unknown; choose one of: off, throughput, balanced",
    ),
    ({"min_window": 4}, "min_window 4 has no effect with adaptive 'off'"),
    (
        {"adaptive": "balanced"},
        "adaptive 'balanced' needs a strategy that attends from block to",
    ),
    (FLOATING | {"policy": "entropy"}, "cannot be combined with policy 'entropy'"),
    (
        FLOATING | {"max_active_blocks": 4},
        "max_active_blocks 4 cannot be combined with adaptive",
    ),
    (
        FLOATING | {"commit_alone_from": 8},
        "commit_alone_from 8 cannot be combined with adaptive",
    ),
    (
        FLOATING | {"use_block_cache": True},
        "use_block_cache True cannot be combined with adapt",
    ),
    (
        FLOATING | {"sub_block_length": 4},
        "sub_block_length 4 cannot be combined with adaptive",
    ),
    (
        FLOATING | {"min_window": 8, "max_window": 4},
        "min_window 8 is wider than max_window 4",
    ),
    (FLOATING | {"max_window": 129}, "max_window 129 is wider than canvas_length 128"),
    (
        FLOATING | {"min_window": 1},
        "min_window 1 brings half a token a forward on LLaDA models",
    ),
    (FLOATING | {"block_add_threshold": 0.2}, "block_add_threshold has no effect"),
    (FLOATING | {"compile_step": True}, "compile_step needs a GPU"),
    (
        {"strategy": "block_diffusion", "adaptive": "balanced", "max_window": 33}
        | {"canvas_length": 64},
        "max_window 33 is wider than block_length 32",
    ),
    (
        {"kv_cache_layout": "paged"},
        "kv_cache_layout 'paged' is unknown; choose one of: auto",
    ),
    ({"strategy": "d2f", "policy": "factor"}, "policy 'factor' has no meaning"),
    ({"cfg_scale": 1.0}, "cfg_scale"),
    (
        {"compile_step": True},
        "compile_step needs a GPU and no enforce_eager: leave compile_step",
    ),
    (
        {"vocab_parallel": True},
        "vocab_parallel needs a tensor_parallel_size of at least 2, got 1",
    ),
    ({"lora_path": 3}, "lora_path must be a folder name, got 3"),
    ("d2f", "additional_config['dllm'] must be a dictionary, got 'd2f'"),
]
WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    (
        STAGES | {"dllm": FLOATING},
        "adaptive 'throughput' cannot be combined with pipeline_parallel_size 2",
    ),
    (
        STAGES | {"dllm": {"strategy": "semi_autoregressive", "cfg_scale": 1.0}},
        "cfg_scale is not supported by pipeline_parallel_size 2.",
    ),
    (
        STAGES
        | {"dllm": {"use_block_cache": True}}
        | {"model": str(CHECKPOINTS / "tiny-fast-dllm-v2")},
        "use_block_cache is not supported by pipeline_parallel_size 2.",
    ),
    (
        STAGES | {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        "worker_cls vllm.v1.worker.cpu_worker.CPUWorker cannot be combined with",
    ),
    (
        {"pipeline_parallel_size": 4},
        "pipeline_parallel_size 4 is more than the model's 3 layers: take 3 at most",
    ),
    (
        MIXTURE | {"enable_expert_parallel": True, "tensor_parallel_size": 2},
        "a mixture of experts cannot be combined with enable_expert_parallel or",
    ),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "speculative",
    ),
    (
        {"attention_backend": "FLEX_ATTENTION"},
        "attention_backend FLEX_ATTENTION is not for CPUs",
    ),
]


def reason(room: EngineRoom, **settings: Any) -> str:
    """Why an engine did not start."""
    with pytest.raises(ValueError) as caught:
        room.start("llada", **settings)
    return str(caught.value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny LLaDA that a test may damage."""
    return Path(shutil.copytree(CHECKPOINTS / "tiny-llada", tmp_path / "damaged"))


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize(("options", "sentence"), WRONG_OPTIONS, ids=str)
def test_option(options: Any, sentence: str, room: EngineRoom) -> None:
    assert sentence in reason(room, dllm=options)


@pytest.mark.parametrize(("settings", "sentence"), WRONG_SETTINGS, ids=str)
def test_engine_setting(
    settings: dict[str, Any], sentence: str, room: EngineRoom
) -> None:
    assert sentence in reason(room, **settings)


def test_no_mask_token(checkpoint: Path, room: EngineRoom) -> None:
    edit_json(checkpoint / "config.json", mask_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        file = checkpoint / name
        file.write_text(file.read_text().replace("<|mdm_mask|>", "<|nothing|>"))
    message = reason(room, model=str(checkpoint))
    assert "No mask token: config.json has no mask_token_id" in message


def test_mask_token_outside_the_vocabulary(checkpoint: Path, room: EngineRoom) -> None:
    edit_json(checkpoint / "config.json", mask_token_id=320)
    assert "mask_token_id 320" in reason(room, model=str(checkpoint))
    edit_json(checkpoint / "config.json", mask_token_id="<mask>")
    assert "mask_token_id '<mask>'" in reason(room, model=str(checkpoint))


def test_mask_token_from_the_tokenizer(checkpoint: Path, room: EngineRoom) -> None:
    """What config.json lacks is found by its text."""
    edit_json(checkpoint / "config.json", mask_token_id=None)
    check(room.start("llada", model=str(checkpoint)), "llada", MIXED[:2])


def test_truncated_weights(checkpoint: Path, room: EngineRoom) -> None:
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    for size in (len(content) // 2, 100, 0):
        weights.write_bytes(content[:size])
        message = reason(room, model=str(checkpoint))
        assert "model.safetensors" in message
        assert "truncated" in message or "damaged" in message


def test_a_weight_too_few_and_one_too_many(checkpoint: Path, room: EngineRoom) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    name = "model.transformer.blocks.1.v_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, file)
    assert name in reason(room, model=str(checkpoint))
    save_file(
        weights | {"model.transformer.blocks.7.v_proj.weight": torch.zeros(1)}, file
    )
    assert "blocks.7.v_proj" in reason(room, model=str(checkpoint))
    save_file(weights | {name: weights[name][:64].contiguous()}, file)
    assert name in reason(room, model=str(checkpoint))


def write_adapter(folder: Path, base: str) -> Path:
    """A rank-2 adapter of zeros on all attention projections."""
    targets = ["q_proj", "k_proj", "v_proj", "attn_out"]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
    config |= {"target_modules": targets, "base_model_name_or_path": base}
    tensors = {}
    for layer in range(3):
        for target in targets:
            module = f"base_model.model.model.transformer.blocks.{layer}.{target}"
            tensors[f"{module}.lora_A.weight"] = torch.zeros(2, 128)
            tensors[f"{module}.lora_B.weight"] = torch.zeros(128, 2)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapter_for_another_base(tmp_path: Path, room: EngineRoom) -> None:
    adapter = write_adapter(tmp_path / "other", "Dream-org/Dream-v0-Base-7B")
    message = reason(room, dllm={"lora_path": str(adapter)})
    assert "Dream-v0-Base-7B" in message
    assert "tiny-llada" in message
    assert "neither a directory nor a repository" in reason(
        room, dllm={"lora_path": str(tmp_path / "nowhere")}
    )


def test_an_adapter_of_zeros_selects_d2f(tmp_path: Path, room: EngineRoom) -> None:
    adapter = write_adapter(tmp_path / "zeros", str(CHECKPOINTS / "tiny-llada"))
    check(room.start("llada", {"lora_path": str(adapter)}), "llada", MIXED[:3])


def test_the_next_engine_starts(room: EngineRoom) -> None:
    """Nothing of the failed starts is left in the process."""
    check(room.start("llada"), "llada", MIXED[:2])


def test_widths_by_load_are_not_batch_invariant(
    room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    said = reason(room, dllm=FLOATING)
    assert (
        "adaptive 'throughput' chooses widths by load, which VLLM_BATCH_INVARIANT"
        in said
    )


@pytest.mark.parametrize(
    ("given", "stages"),
    [("2,1", 1), ("1,1,1", 2), ("2,2", 2), ("3,0", 2), ("a,3", 2), ("", 2)],
)
def test_layers_divided_in_vain(
    given: str, stages: int, room: EngineRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", given)
    said = reason(room, pipeline_parallel_size=stages)
    sentence = f"VLLM_PP_LAYER_PARTITION {given!r} does not divide the model's 3 layers"
    assert sentence in said and f"pipeline_parallel_size {stages}: write" in said


@pytest.mark.skipif(len(get_visible_memory_node()) > 1, reason="a NUMA node a rank")
@pytest.mark.parametrize(
    "command",
    [
        ["verify", str(CHECKPOINTS / "tiny-llada"), "--tensor-parallel-size", "2"],
        ["bench", "step", "--shapes", "tiny", "--enforce-eager"]
        + ["--pipeline-parallel-size", "2"],
    ],
    ids=lambda words: words[0],
)
def test_more_ranks_than_numa_nodes(
    command: list[str],
    room: EngineRoom,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM asserts in this process that each rank has a node of its own."""
    room.close()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    assert cli.main(command) == 1
    (sentence,) = capsys.readouterr().err.splitlines()[-1:]
    assert sentence.startswith("diffuplug: error: the engine did not start (Not enough")
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind binds none." in sentence
