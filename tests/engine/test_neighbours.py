"""Other models in the same installation, and in the same process, do not notice us."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHECKPOINTS, EngineRoom, a_prompt, generate, params, token_ids
from jobs import MIXED, check
from processes import SETTINGS, offline

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

PROMPTS = [a_prompt(5, 1), a_prompt(40, 2), a_prompt(17, 3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary autoregressive Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    """Greedy continuations by transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(24):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def wish_for(model: Path, **options: Any) -> dict[str, Any]:
    engine = SETTINGS | {
        "model": str(model),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    wants = [
        {"prompt": p, "params": {"max_tokens": 24, "detokenize": False}}
        for p in PROMPTS
    ]
    return {"engine": engine | options, "requests": wants}


def test_llama_with_the_plugin(llama: Path, expected: list[list[int]]) -> None:
    assert offline(wish_for(llama)) == [expected]


def test_diffusion_then_llama_then_diffusion(
    llama: Path, expected: list[list[int]], room: EngineRoom
) -> None:
    """All engines in this one process."""
    check(room.start("llada"), "llada", MIXED[:3])
    ordinary = room.start(
        "llama", model=str(llama), skip_tokenizer_init=True, additional_config={}
    )
    outputs = generate(ordinary, PROMPTS, params(24, detokenize=False))
    assert [token_ids(output) for output in outputs] == expected
    check(room.start("dream"), "dream", MIXED[:3])


def test_without_the_entry_point(llama: Path, expected: list[list[int]]) -> None:
    """Nothing is loaded until a script registers by hand; in one process that is enough."""
    jobs = MIXED[:2]
    wants = [
        {
            "prompt": list(j.prompt),
            "params": {"max_tokens": j.max_tokens, "extra_args": x},
        }
        for j in jobs
        for x in [{"dllm_block_length": 16} | {f"dllm_{k}": v for k, v in j.numbers}]
    ]
    engine = SETTINGS | {
        "model": str(CHECKPOINTS / "tiny-dream"),
        "enforce_eager": True,
    }
    engine["additional_config"] = {"dllm": {"strategy": "d2f"}}
    wish = {"engine": engine, "requests": wants, "register": True}
    variables = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    without, by_hand = offline(wish_for(llama), wish, **variables)
    assert without == expected
    assert by_hand == [j.expected("dream")[0] for j in jobs]
