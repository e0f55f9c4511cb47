"""Full-attention decodes on a GPU: fp32, Triton attention, piecewise CUDA graphs and eager."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from full_goldens import FILES, GOLDENS, cases_of


def sampling_params(case):
    from vllm import SamplingParams

    numbers = {f"dllm_{name}": value for name, value in case.numbers().items()}
    return SamplingParams(
        max_tokens=case.max_tokens, temperature=0, ignore_eos=True, extra_args=numbers
    )


@pytest.mark.parametrize(("family", "strategy"), FILES, ids=str)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_and_forwards_equal_the_reference(family, strategy, eager):
    """What the recorded random numbers decide runs on the CPU alone."""
    from vllm import LLM

    engine = LLM(
        str(GOLDENS / "checkpoints" / f"tiny-{family}"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=eager,
        kv_cache_memory_bytes=64 << 20,
        attention_backend="TRITON_ATTN",
        additional_config={"dllm": {"strategy": strategy}},
    )
    cases = [case for case in cases_of(family, strategy) if not case.is_random]
    shuffled = random.Random(0).sample(cases, len(cases))
    wrong = []
    for batch in [*([case] for case in cases), shuffled]:
        prompts = [{"prompt_token_ids": case.prompt} for case in batch]
        outputs = engine.generate(prompts, [sampling_params(c) for c in batch], use_tqdm=False)
        for case, output in zip(batch, outputs, strict=True):
            completion = output.outputs[0]
            forwards = sum(completion.spec_decode_metrics.histogram)
            got = list(completion.token_ids), forwards
            if got != (case.record["output_ids"], case.record["num_forwards"]):
                wrong.append(case.name)
    engine.llm_engine.engine_core.shutdown()
    assert wrong == []
