"""Float8 keys and values on FlashAttention 3, bfloat16 models; needs a Hopper GPU.

SDAR's layers convert and store as vLLM does, LLaDA's in the kernel that rotates.
"""

from itertools import pairwise

import pytest
import torch
from dummies import worker_of
from engines import a_prompt, generate, params, token_ids
from test_flash_graphs import BEFORE_TIES, EAGER, agree, end, engine_of, graphs
from test_flash_graphs import cascade as cascade
from test_flash_graphs import in_process as in_process
from test_flash_graphs import pytestmark as pytestmark

FAMILIES = ("sdar", "llada")
MANY, REWRITES, BLOCK = 64, 10, 16
# A position in each forward; the second kind in the order of the text.
ONE_BY_ONE = {"dllm_policy": "low_confidence", "dllm_steps": BLOCK}
IN_ORDER = {
    "sdar": {"dllm_policy": "sequential"},
    "llada": {"dllm_block_length": 1},
}


def start(family, compilation, **options):
    dllm = {"canvas_length": 32, "block_length": BLOCK, "commit_alone_from": 0}
    if family == "llada":
        dllm["strategy"] = "block_diffusion"
    settings = {"kv_cache_dtype": "fp8", "max_model_len": 512}
    return engine_of(f"tiny-{family}", dllm, compilation, **settings | options)


def layers_of(engine):
    """The attention layers of an engine in this process."""
    config = worker_of(engine).vllm_config.compilation_config
    return list(config.static_forward_context.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_equal_eager(family):
    """Contexts of at most 128 tokens, which no setting splits: exact, in each of two batches."""
    prompts = [a_prompt(9 + 8 * n, n) for n in range(6)]
    wishes = [params(20 + 8 * n, **ONE_BY_ONE) for n in range(6)]
    answers = []
    for compilation in (EAGER, graphs(32)):
        engine = start(family, compilation, splits=1)
        for layer in layers_of(engine):
            assert layer.kv_cache.element_size() == 1
        answers += [
            [token_ids(output) for output in generate(engine, prompts, wishes)]
            for _ in range(2)
        ]
        end(engine)
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_beside_63_others(family, quantization):
    """The same tokens, up to near ties: kernels for other numbers of rows round differently.

    With one split, since probabilities are rounded to float8 by split.
    """
    compilation = graphs(32, *range(16, MANY + 1, 16))
    options = {"max_num_seqs": MANY, "quantization": quantization, "splits": 1}
    engine = start(family, compilation, **options)
    prompts = [a_prompt(5 + 3 * n, n) for n in range(MANY)]
    wish = params(48, logprobs=5, **IN_ORDER[family])
    together = generate(engine, prompts, [wish] * MANY)
    watched = range(0, MANY, 9)
    apart = [generate(engine, [prompts[n]], [wish])[0] for n in watched]
    end(engine)
    alone = dict(zip(watched, apart, strict=True))
    assert agree(alone, {n: together[n] for n in watched}) > BEFORE_TIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rewritten_canvas_leaves_committed_bytes(family):
    """A scale that moved with the canvas would change what committed keys mean."""
    engine = start(family, graphs(32), kv_cache_memory_bytes=4 << 20)
    layers = layers_of(engine)
    for layer in layers:
        layer.kv_cache.zero_()

    def stored():
        """Bytes of all layers ``[layers, positions, bytes]``."""
        found = []
        for layer in layers:
            rows = layer.kv_cache.view(torch.uint8).transpose(1, 2)
            found.append(rows.reshape(rows.shape[0] * rows.shape[1], -1).cpu())
        return torch.stack(found)

    scales = [float(layer._k_scale) for layer in layers]
    wish = params(2 * BLOCK, **ONE_BY_ONE)
    prompt = {"prompt_token_ids": a_prompt(4 * BLOCK, 1)}
    engine.llm_engine.add_request("x", prompt, wish)
    engine.llm_engine.step()
    versions = [stored()]
    present = (versions[0] != 0).any(dim=2).all(dim=0)
    for _ in range(REWRITES):
        engine.llm_engine.step()
        versions.append(stored())
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
    versions.append(stored())
    after = [float(layer._k_scale) for layer in layers]
    end(engine)
    steps = [one != other for one, other in pairwise(versions)]
    assert sum(bool(changed.any()) for changed in steps) >= REWRITES
    changed = torch.stack(steps).any(dim=0).any(dim=2).any(dim=0)
    assert int((present & ~changed).sum()) >= 4 * BLOCK
    assert scales == after == [1.0] * len(layers)
