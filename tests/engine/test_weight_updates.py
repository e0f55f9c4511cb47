"""New weights in a running engine, in parts: the tokens of an engine that started with them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_files
from engines import CHECKPOINTS, EngineRoom, generate, letters, params, token_ids
from quantised import DTYPE, quantise
from safetensors.torch import load_file, save_file
from trained_weights import trained

from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model

pytestmark = pytest.mark.slow

DECODING = {
    "llada": {"strategy": "dual_cache"},
    "dream": {"strategy": "semi_autoregressive"},
    "sdar": {},
    "sdar-moe": {},
    "llada2.0": {},
    "llada2.1": {},
    "fast-dllm-v2": {},
    "fast-dllm-v2-tied": {},
}
TRANSFER = {"weight_transfer_config": {"backend": weight_files.BACKEND}}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def scores(llm: Any) -> list[float]:
    """Log-probabilities of tokens behind problems, which an adapter moves if it moves no token."""
    prompts = [llm.get_tokenizer().encode(one.question) for one in problems_of(3)]
    found = generate(llm, prompts, params(20, logprobs=0))
    places = [place for output in found for place in output.outputs[0].logprobs]
    return [one.logprob for place in places for one in place.values()]


def tokens(llm: Any) -> list[list[int]]:
    prompts = [letters(12, seed) for seed in range(3)]
    return [token_ids(output) for output in generate(llm, prompts, params(20))]


def send(llm: Any, checkpoint: Path, *parts: list[str]) -> None:
    """What a trainer does between `pause` and `resume`."""
    file = str(checkpoint / "model.safetensors")
    llm.start_weight_update()
    for names in parts:
        llm.update_weights({"update_info": {"file": file, "names": names}})
    llm.finish_weight_update()


def halves(checkpoint: Path) -> tuple[list[str], list[str]]:
    """Query, key and value of a layer, gate and up, and experts lie in both."""
    names = sorted(load_file(checkpoint / "model.safetensors"))
    return names[::2], names[1::2]


@pytest.mark.parametrize("name", DECODING)
def test_two_halves_give_the_tokens_of_a_fresh_start(
    room: EngineRoom, tmp_path: Path, name: str
) -> None:
    old = CHECKPOINTS / f"tiny-{name}"
    new = trained(old, tmp_path)
    wanted = tokens(room.start(name, DECODING[name], model=str(new)))
    llm = room.start(name, DECODING[name], **TRANSFER)
    before = tokens(llm)
    assert before != wanted
    first, second = halves(new)
    send(llm, new, first, second)
    assert tokens(llm) == wanted
    with pytest.raises(
        ValueError, match=rf"The update has no weight '.*' \(and {len(second) - 1}"
    ):
        send(llm, old, first)
    assert tokens(llm), "half of the layers are old"
    send(llm, old, second, first)
    assert tokens(llm) == before
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    assert tokens(llm) == wanted


@pytest.fixture
def llm(room: EngineRoom) -> Any:
    """An engine that takes updates, with its first weights."""
    llm = room.start("sdar", {}, **TRANSFER)
    send(llm, CHECKPOINTS / "tiny-sdar", [])
    llm.reset_prefix_cache()
    return llm


def write(path: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """The weights of SDAR in `path`, some changed or left out."""
    tensors = load_file(CHECKPOINTS / "tiny-sdar" / "model.safetensors") | changes
    path.mkdir()
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {Q_PROJ: torch.zeros(3, 2)},
            f"Weight '{Q_PROJ}' in the update has shape (3, 2), but",
        ),
        (
            {"x.weight": torch.zeros(1)},
            "The update holds a weight 'x.weight' that this model does",
        ),
        ({Q_PROJ: None}, f"The update has no weight '{Q_PROJ}'."),
    ],
    ids=["shape", "surplus", "missing"],
)
def test_a_wrong_update_is_named_and_ends(
    llm: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    """All other weights are those that the engine has, so its tokens say what it kept."""
    before = tokens(llm)
    with pytest.raises(ValueError) as caught:
        send(llm, write(tmp_path / "wrong", changes), [])
    assert str(caught.value).startswith(sentence)
    llm.reset_prefix_cache()
    assert tokens(llm) == before
    send(llm, CHECKPOINTS / "tiny-sdar", [])
    assert tokens(llm) == before


def test_a_wrong_checkpoint_is_named_and_undone(llm: Any, tmp_path: Path) -> None:
    before, wrong = tokens(llm), write(tmp_path / "wrong", {Q_PROJ: None})
    shutil.copy(CHECKPOINTS / "tiny-sdar" / "config.json", wrong)
    with pytest.raises(ValueError, match=f"The checkpoint has no weight '{Q_PROJ}'"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(wrong)})
    llm.reset_prefix_cache()
    assert tokens(llm) == before


def test_a_weight_comes_once(llm: Any) -> None:
    with pytest.raises(
        ValueError, match=f"Weight '{Q_PROJ}' comes twice in one update"
    ):
        send(llm, CHECKPOINTS / "tiny-sdar", [Q_PROJ], [Q_PROJ])
    assert tokens(llm)


def test_the_order_of_calls_is_kept(llm: Any) -> None:
    before, file = tokens(llm), str(CHECKPOINTS / "tiny-sdar" / "model.safetensors")
    with pytest.raises(RuntimeError, match="start_weight_update must be called before"):
        llm.update_weights({"update_info": {"file": file}})
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        llm.start_weight_update()
    with pytest.raises(RuntimeError, match="finish the update first"):
        llm.collective_rpc("reload_weights")
    llm.finish_weight_update()  # nothing came, nothing changes
    assert tokens(llm) == before


def test_kept_prefixes_are_those_of_the_old_weights(
    room: EngineRoom, tmp_path: Path
) -> None:
    """What vLLM's `/pause` clears, an engine without a server clears when it is told to."""
    new, prompt = trained(CHECKPOINTS / "tiny-sdar", tmp_path), [letters(100)]

    def ask(llm: Any) -> Any:
        return generate(llm, prompt, params(16))[0]

    caching = {"enable_prefix_caching": True, "block_size": 32}
    wanted = token_ids(ask(room.start("sdar", {}, model=str(new), **caching)))
    llm = room.start("sdar", {}, **caching, **TRANSFER)
    ask(llm)
    assert ask(llm).num_cached_tokens > 0
    send(llm, new, [])
    assert llm.reset_prefix_cache()
    after = ask(llm)
    assert (after.num_cached_tokens, token_ids(after)) == (0, wanted)


def test_quantised_weights_are_refused_on_cpus(
    room: EngineRoom, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny-sdar"
    shutil.copytree(CHECKPOINTS / "tiny-sdar", folder)
    quantise(folder, "tiny-sdar", "int")
    dtype = str(DTYPE).removeprefix("torch.")
    llm = room.start("sdar", {}, model=str(folder), dtype=dtype, **TRANSFER)
    before = tokens(llm)
    with pytest.raises(
        ValueError, match="^Quantised weights cannot be updated in place on CPUs"
    ):
        llm.start_weight_update()
    with pytest.raises(
        ValueError, match="^Quantised weights cannot be updated in place on CPUs"
    ):
        llm.collective_rpc("reload_weights")
    assert tokens(llm) == before


@pytest.mark.parametrize("merged", [False, True])
def test_a_merged_adapter_has_its_sentence(room: EngineRoom, merged: bool) -> None:
    model, dllm = default_model.path(), {"lora_path": default_model.adapter_path()}
    dllm |= {"merged_updates": True} if merged else {}
    llm = room.start(dllm=dllm, model=model, max_model_len=128, **TRANSFER)
    before = scores(llm)
    if merged:
        send(llm, Path(model), [])
        assert scores(llm) != before, "the base alone: it was taken for merged"
        return
    with pytest.raises(ValueError) as caught:
        llm.start_weight_update()
    assert str(caught.value) == (
        "Weights cannot be updated in place under lora_path: the adapter was merged at load."
    )
    assert scores(llm) == before
    llm.collective_rpc("reload_weights")
    assert scores(llm) == before, "merged again"
