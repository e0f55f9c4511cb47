"""SDAR, LLaDA2, Fast-dLLM v2 on a GPU: fp32, Triton attention, full CUDA graphs, async."""

import pytest
import recorded
import test_block_goldens
import test_grid_goldens


@pytest.mark.parametrize("model", [*test_grid_goldens.FILES, *test_block_goldens.FILES])
def test_tokens_and_forwards_equal_the_reference(model):
    recorded.check_blocks(model)


@pytest.mark.parametrize("model", ["sdar", "llada2.1"])
def test_blocks_commit_alone_while_many_requests_run(model):
    """Steps of one block each between steps of whole canvases.

    Requests bring block lengths of their own here, so most of these steps are in piecewise graphs.
    """
    passes = []
    for case, output in recorded.decode_blocks(model, {"commit_alone_from": 3}):
        completion = output.outputs[0]
        assert list(completion.token_ids) == case["output_ids"], case["id"]
        passes.append(sum(completion.spec_decode_metrics.histogram))
    # The same cases alone, where commits ride along, and together.
    assert sum(passes[: len(passes) // 2]) < sum(passes[len(passes) // 2 :])
