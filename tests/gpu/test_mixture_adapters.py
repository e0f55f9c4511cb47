"""Adapters that requests choose, on mixtures of experts: bf16, for vLLM's kernels need it.

Log-probabilities are those of a checkpoint with the adapter merged, up to rounding.
"""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import recorded
from engines import CHECKPOINTS, a_prompt
from trained_adapters import merged, write_adapter

ATTENTION = ["q_proj", "v_proj", "o_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]
MODELS = {
    "llada-moe": {"strategy": "dual_cache"},
    "rnd1": {"strategy": "semi_autoregressive"},
    "sdar-moe": {"strategy": "block_diffusion"},
}
LENGTH = {"rnd1": 2}  # of answers, else 1: RND1 reserves its last position
PROMPTS = [a_prompt(9 + i, i) for i in range(4)]


def start(model: str, folder: Path, **options: Any) -> Any:
    options |= {
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_logprobs": 64,
    }
    return recorded.start(str(folder), MODELS[model], **options)


def scores(model: str, engine: Any, adapter: Any = None) -> list[dict[int, float]]:
    """Log-probabilities of 64 candidates for the first token after each prompt."""
    from vllm import SamplingParams

    wish = SamplingParams(max_tokens=LENGTH.get(model, 1), temperature=0, logprobs=64)
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(inputs, wish, use_tqdm=False, lora_request=adapter)
    found = []
    for output in outputs:
        row = output.outputs[0].logprobs[0]
        found.append({token: one.logprob for token, one in row.items()})
    return found


def distances(
    some: list[dict[int, float]], others: list[dict[int, float]]
) -> list[float]:
    """Return the largest difference of a token that both name, for each prompt."""
    found = []
    for one, other in zip(some, others, strict=True):
        both = one.keys() & other.keys()
        found.append(max(abs(one[token] - other[token]) for token in both))
    return found


def distance(some: list[dict[int, float]], others: list[dict[int, float]]) -> float:
    """Return the median of prompts: a router at a near tie takes other experts by rounding."""
    return median(distances(some, others))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("targets", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_an_adapter_equals_the_merged_checkpoint(
    tmp_path: Path, model: str, targets: list[str]
) -> None:
    from vllm.lora.request import LoRARequest

    checkpoint = CHECKPOINTS / f"tiny-{model}"
    adapter = write_adapter(tmp_path / "adapter", checkpoint, targets, 1)
    folder = merged(tmp_path / "merged" / checkpoint.name, checkpoint, adapter)
    engine = start(model, folder)
    wanted = scores(model, engine)
    engine.llm_engine.engine_core.shutdown()
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    engine = start(model, checkpoint, **options)
    plain = scores(model, engine)
    adapted = scores(model, engine, LoRARequest("one", 1, str(adapter)))
    plain_again = scores(model, engine)
    engine.llm_engine.engine_core.shutdown()
    far = distance(plain, wanted)
    near = distance(adapted, wanted)
    print(f"{model}: {near:.3f} from the merged checkpoint, without adapter {far:.3f}")
    assert far > 0.3 and near < far / 4
    assert distance(plain, plain_again) < far / 4
