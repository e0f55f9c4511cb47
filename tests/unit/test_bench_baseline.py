"""Compare the loops that `--vs hf` runs on transformers with recorded traces of the authors'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from diffuplug_bench import published_loops
from diffuplug_bench.model_shapes import (
    AUTOREGRESSIVE,
    SHAPES,
    Sizes,
    autoregressive_config,
    write_config,
)
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.text import Text

TESTS = Path(__file__).parents[1]
RECORDS = {"llada": "llada_vanilla", "Dream": "dream_maskgit_plus"}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def is_default(settings: dict[str, Any]) -> bool:
    """Blocks as published, and nothing but greedy decoding."""
    known = {"alg", "max_new_tokens", "steps", "gen_length", "block_length"}
    return (
        settings.get("block_length", published_loops.LLADA_BLOCK) == 32
        and set(settings) <= known
    )


@torch.no_grad()
@pytest.mark.parametrize("family", RECORDS)
def test_loop_decodes_what_the_authors_do(family: str) -> None:
    record = json.loads((TESTS / "goldens" / f"{RECORDS[family]}.json").read_text())
    folder = TESTS / "goldens" / record["checkpoint"]
    model = published_loops.build(config_of(folder), torch.device("cpu"), torch.float32)
    model.load_state_dict(PlainModel.load(folder).weights)
    mask_id, shift = record["mask_id"], record["logits_shift"]
    plain = published_loops.Bidirectional(model, shift, mask_id)
    cases = [case for case in record["cases"] if is_default(case["settings"])]
    assert len(cases) >= 3
    for case in cases:
        length, steps = len(case["output_ids"]), case["settings"]["steps"]
        rules = published_loops.rules_of(family, length, steps)
        got = decode(Text(plain, case["prompt_ids"], length, rules))
        assert got == (case["output_ids"], case["num_forwards"]), case["id"]


def test_a_causal_model_is_refused() -> None:
    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(32, 4)

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            hidden = self.table(input_ids).cumsum(1)
            return type("Output", (), {"logits": hidden})

    with pytest.raises(ValueError, match="attends causally"):
        published_loops.Bidirectional(Causal(), False, 31)


def test_models_without_a_loop_are_refused() -> None:
    with pytest.raises(ValueError, match="not of 'sdar'"):
        published_loops.check({"model_type": "sdar"})


def test_rates_become_steps() -> None:
    config = config_of(TESTS / "goldens" / "checkpoints" / "tiny-llada")
    one, three = published_loops.measure(
        config, [1, 2, 3], 64, [1.0, 3.0], "cpu", torch.float32
    )
    assert (one["tokens"], one["forwards"], one["tokens_per_forward"]) == (64, 64, 1.0)
    # Each of the two blocks takes the third of 32 steps, rounded.
    assert (three["tokens"], three["forwards"]) == (64, 22)
    assert three["ms_per_forward"] == pytest.approx(1e3 * three["seconds"] / 22)


@pytest.mark.usefixtures("model_classes")
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_vllm_takes_the_shapes_and_their_autoregressive_models(
    name: str, tmp_path: Path
) -> None:
    """Without loading anything: ours resolved by our hook, the autoregressive one by vLLM alone."""
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 512}
    shapes = SHAPES[name]
    block = 32 if shapes.get("expert_capacity") else 16
    decode: dict[str, object] = {"canvas_length": 2 * block}
    # RND1's text is one block; I-DLM and WeDLM have strategies of their own.
    others = shapes["model_type"] in ("rnd1", "wedlm")
    if not others and shapes.get("block_size") != 1:
        decode |= {"strategy": "block_diffusion", "block_length": block}
    folder = write_config(shapes, tmp_path / "ours")
    ours = EngineArgs(
        folder, additional_config={"dllm": decode}, **dummy
    ).create_engine_config()
    assert get_decode_config(ours).canvas_length == 2 * block
    config = ours.model_config
    sizes = Sizes.of(shapes)
    assert (config.get_head_size(), config.get_vocab_size()) == (
        sizes.head,
        sizes.vocab,
    )
    if shapes["model_type"] not in AUTOREGRESSIVE:
        return
    folder = write_config(autoregressive_config(shapes), tmp_path / "autoregressive")
    theirs = EngineArgs(folder, **dummy).create_engine_config().model_config
    assert theirs.architecture == AUTOREGRESSIVE[shapes["model_type"]][0]
    parallel = ours.parallel_config
    for count in ("get_num_kv_heads", "get_num_attention_heads", "get_num_layers"):
        assert getattr(theirs, count)(parallel) == getattr(config, count)(parallel)
    rope = shapes.get("rope_parameters", shapes)
    assert theirs.hf_config.rope_parameters["rope_theta"] == rope["rope_theta"]
