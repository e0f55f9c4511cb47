"""Adapters that requests choose: the tokens of an engine with that adapter merged."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import CHECKPOINTS, EngineRoom, letters, params, token_ids
from safetensors.torch import load_file, save_file
from test_watched import check_frames
from test_weight_updates import TRANSFER, halves, send
from trained_adapters import merged, write_adapter
from trained_weights import trained

from dllm_plugin.commands.verify.second_opinion import Job, decode_job
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.reference.model import PlainModel

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llada": ({"strategy": "d2f"}, ["q_proj", "k_proj", "v_proj", "attn_out"]),
    "dream": ({"strategy": "dual_cache"}, ["q_proj", "v_proj", "o_proj", "down_proj"]),
    "sdar": ({}, ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]),
    "fast-dllm-v2": ({}, ["q_proj", "o_proj", "up_proj"]),
    "fast-dllm-v2-tied": ({}, ["v_proj", "down_proj"]),
}
PROMPTS = [letters(12, seed) for seed in range(3)]
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


IDS = itertools.count(
    1
)  # an engine that two tests share keeps adapters by their number


def request(folder: Path) -> Any:
    from vllm.lora.request import LoRARequest

    number = next(IDS)
    return LoRARequest(f"adapter-{number}", number, str(folder))


def tokens(llm: Any, chosen: Any = None) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(inputs, params(20), use_tqdm=False, lora_request=chosen)
    return [token_ids(output) for output in outputs]


@pytest.mark.parametrize(
    "name",
    [
        "llada",
        "dream",
        "sdar",
        "fast-dllm-v2",
        "fast-dllm-v2-tied",
    ],
)
def test_a_batch_of_adapters_equals_merged_engines(
    room: EngineRoom, tmp_path: Path, name: str
) -> None:
    """Base, first and second adapter side by side, and each of them alone."""
    (dllm, targets), checkpoint = CASES[name], CHECKPOINTS / f"tiny-{name}"
    adapters = [
        write_adapter(tmp_path / f"a{n}", checkpoint, targets, n) for n in (1, 2)
    ]
    wanted = [tokens(room.start(name, dllm))]
    for number, adapter in enumerate(adapters):
        folder = merged(
            tmp_path / f"merged{number}" / f"tiny-{name}", checkpoint, adapter
        )
        wanted.append(tokens(room.start(name, dllm, model=str(folder))))
    assert all(len({tuple(found[n]) for found in wanted}) == 3 for n in range(3))
    llm = room.start(name, dllm, **LORA)
    first, second = map(request, adapters)
    for chosen, one in zip((None, first, second), wanted, strict=True):
        assert tokens(llm, [chosen] * 3) == one
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        chosen = [(None, first, second)[n] for n in order]
        assert tokens(llm, chosen) == [wanted[n][row] for row, n in enumerate(order)]


VERIFYING: dict[str, dict[str, Any]] = {
    "nemotron": {"strategy": "self_speculation"},
    "idlm": {"block_length": 4},
    "wedlm": {},
    "wedlm-qwen2": {},
}


@pytest.mark.parametrize("name", VERIFYING)
def test_adapters_of_causal_families(
    name: str, room: EngineRoom, tmp_path: Path
) -> None:
    """The answer of the plain model with the adapter merged, beside one without.

    Then canvases are watched, and new weights come in place.
    """
    folder, dllm = CHECKPOINTS / f"tiny-{name}", VERIFYING[name]
    adapter = write_adapter(
        tmp_path / "adapter", folder, ["q_proj", "o_proj", "down_proj"]
    )
    llm = room.start(name, dllm, **LORA, **TRANSFER)
    config = get_decode_config(llm.llm_engine.vllm_config)

    def plain(folder: Path, **chosen: Path) -> list[list[int]]:
        model, found = PlainModel.load(folder, config.mask_token_id, **chosen), []
        for prompt in PROMPTS:
            job = Job(prompt, 20, config, set(), 160)
            found.append(decode_job(model, job, lambda step: None).tokens)
        return found

    wanted = plain(folder) + plain(folder, adapter=adapter)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS * 2],
        params(20),
        use_tqdm=False,
        lora_request=[None] * 3 + [request(adapter)] * 3,
    )
    assert [token_ids(output) for output in outputs] == wanted
    assert wanted[:3] != wanted[3:]
    check_frames(llm)
    new = trained(folder, tmp_path)
    send(llm, new, *halves(new))
    llm.reset_prefix_cache()
    assert tokens(llm) == plain(new) != wanted[:3]


def test_prefixes_of_adapters_are_not_shared(room: EngineRoom, tmp_path: Path) -> None:
    """Each finds its own pages of the same prompt again, and nobody else's."""
    adapters = [
        write_adapter(
            tmp_path / f"a{n}", CHECKPOINTS / "tiny-sdar", ["q_proj", "v_proj"], n
        )
        for n in (1, 2)
    ]
    llm = room.start("sdar", {}, enable_prefix_caching=True, block_size=32, **LORA)
    chosen = [None, *map(request, adapters)]

    def cached(one: Any) -> int:
        inputs = {"prompt_token_ids": letters(100)}
        [output] = llm.generate(inputs, params(8), use_tqdm=False, lora_request=one)
        return int(output.num_cached_tokens)

    assert [cached(one) for one in chosen] == [0, 0, 0]
    assert [cached(one) for one in chosen] == [96, 96, 96]


def test_an_adapter_loaded_again_finds_no_old_pages(
    room: EngineRoom, tmp_path: Path
) -> None:
    """Under its old name and path it has new weights and another number, as in a server."""
    from vllm.lora.request import LoRARequest

    folder, caching = tmp_path / "math", {"enable_prefix_caching": True}
    llm = room.start("sdar", {}, block_size=32, **caching, **LORA)
    inputs = {"prompt_token_ids": letters(100)}
    for number in (next(IDS), next(IDS)):
        write_adapter(folder, CHECKPOINTS / "tiny-sdar", ["q_proj", "v_proj"], number)
        one = LoRARequest("math", number, str(folder))
        assert llm.llm_engine.add_lora(one)
        for cached in (0, 96):
            [output] = llm.generate(inputs, params(8), lora_request=one)
            assert output.num_cached_tokens == cached
        llm.llm_engine.remove_lora(number)
        shutil.rmtree(folder)


def test_loading_in_place_is_refused(room: EngineRoom, tmp_path: Path) -> None:
    """vLLM would read such an adapter in every step."""
    folder = write_adapter(tmp_path / "a", CHECKPOINTS / "tiny-sdar", ["q_proj"], 1)
    llm = room.start("sdar", {}, **LORA)
    one = msgspec.structs.replace(request(folder), load_inplace=True)
    with pytest.raises(ValueError, match="^load_inplace would read the adapter again"):
        llm.llm_engine.add_lora(one)
    inputs = {"prompt_token_ids": letters(12)}
    [output] = llm.generate(inputs, params(8), lora_request=one)
    assert output.outputs[0].finish_reason == "error"
    assert tokens(llm)


def test_adapters_come_and_go(room: EngineRoom, tmp_path: Path) -> None:
    """Three of them take turns in two slots, beside requests without one."""
    checkpoint = CHECKPOINTS / "tiny-sdar"
    chosen = [
        request(write_adapter(tmp_path / f"a{n}", checkpoint, ["q_proj", "v_proj"], n))
        for n in (1, 2, 3)
    ]
    llm = room.start("sdar", {}, **LORA)
    alone = [tokens(llm, [one] * 3) for one in (None, *chosen)]
    for one, other in ((1, 2), (3, 1), (2, 3)):
        found = tokens(llm, [None, chosen[one - 1], chosen[other - 1]])
        assert found == [alone[0][0], alone[one][1], alone[other][2]]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "ff_out",
        {},
        "which lies in no layer: requests can choose updates only of layers",
    ),
    ("q_proj", {"base_model_name_or_path": "a/other"}, "but the model served is"),
    (
        "q_proj",
        {"target_modules": ["q_proj", "x_proj"]},
        "'x_proj', a module this model does not",
    ),
    ("q_proj", {"use_dora": True}, "use_dora=True; only use_dora=False can be merged"),
]


@pytest.mark.parametrize(("target", "config", "sentence"), REFUSED)
def test_adapters_that_do_not_fit_are_refused_by_name(
    room: EngineRoom, tmp_path: Path, target: str, config: dict[str, Any], sentence: str
) -> None:
    llm = room.start("llada", {"strategy": "dual_cache"}, **LORA)
    before = tokens(llm)
    adapter = write_adapter(
        tmp_path / "wrong", CHECKPOINTS / "tiny-llada", [target], **config
    )
    with pytest.raises(ValueError) as caught:
        llm.llm_engine.add_lora(request(adapter))
    assert sentence in str(caught.value)
    assert tokens(llm) == before


def test_a_d2f_adapter_is_refused_under_another_strategy(
    room: EngineRoom, tmp_path: Path
) -> None:
    llm = room.start("llada", {"strategy": "dual_cache"}, **LORA)
    adapter = write_adapter(
        tmp_path / "D2F_LLaDA_Lora", CHECKPOINTS / "tiny-llada", ["q_proj"]
    )
    with pytest.raises(
        ValueError, match="was trained for the strategy 'd2f'.*by 'dual_cache'"
    ):
        llm.llm_engine.add_lora(request(adapter))


def test_weights_are_updated_under_adapters(room: EngineRoom, tmp_path: Path) -> None:
    """vLLM loads the adapters again."""
    checkpoint = CHECKPOINTS / "tiny-sdar"
    adapter = write_adapter(tmp_path / "a", checkpoint, ["q_proj", "v_proj"])
    base = tmp_path / "base" / "tiny-sdar"
    shutil.copytree(checkpoint, base)
    weights = load_file(base / "model.safetensors")
    changed = {name: torch.flip(weight, [0]) for name, weight in weights.items()}
    (base / "model.safetensors").unlink()
    save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
    wanted = tokens(
        room.start("sdar", {}, model=str(merged(tmp_path / "m", base, adapter)))
    )
    llm = room.start("sdar", {}, **LORA)
    chosen = [request(adapter)] * 3
    assert tokens(llm, chosen) != wanted
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(base)})
    llm.reset_prefix_cache()
    assert tokens(llm, chosen) == wanted


def test_engines_without_adapters_compute_none(room: EngineRoom) -> None:
    from vllm.lora.layers import BaseLayerWithLoRA

    def wrapped(model: Any) -> int:
        return sum(isinstance(layer, BaseLayerWithLoRA) for layer in model.modules())

    assert room.start("sdar", {}).apply_model(wrapped) == [0]
    layers, linear = 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert room.start("sdar", {}, **LORA).apply_model(wrapped) == [layers * len(linear)]
