"""64 requests with the same parameter, a vocabulary of LLaDA's size, in vLLM's share of the memory.

The KV cache takes all that vLLM's profile leaves, and the allocator may take 1 GiB more than that.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from neighbours import KINDS, real_sized, wish

REQUESTS, VOCAB = 64, 126_464
GIVEN, SPARE = 28 << 30, 1 << 30  # bytes of vLLM's share of the memory, and beside it


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from vllm import LLM

    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(
            model=real_sized(tmp_path_factory.mktemp("model"), VOCAB),
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=REQUESTS,
            gpu_memory_utilization=GIVEN / total,
            additional_config={
                "dllm": {"strategy": "d2f", "canvas_length": 32, "block_length": 8}
            },
        )
    torch.cuda.set_per_process_memory_fraction((GIVEN + SPARE) / total)
    yield llm
    torch.cuda.set_per_process_memory_fraction(1.0)
    llm.llm_engine.engine_core.shutdown()


def decode(llm, kind):
    """Decode all requests at once; return the bytes that are held afterwards."""
    prompts = [[40 + (7 * i + j * j) % 80 for j in range(8)] for i in range(REQUESTS)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, [wish(kind) for _ in prompts], use_tqdm=False)
    assert all(output.outputs[0].token_ids for output in outputs)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("kind", KINDS)
def test_many_of_a_kind_fit_and_grow_nothing(engine, kind):
    once = decode(engine, KINDS[kind])
    assert decode(engine, KINDS[kind]) <= once + (1 << 20)
