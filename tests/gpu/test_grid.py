"""SDAR, LLaDA2, Fast-dLLM v2 on a GPU: fp32, Triton attention, full CUDA graphs, async."""

import block_cases
import pytest
import recorded
import test_grid_goldens


@pytest.mark.parametrize("model", [*test_grid_goldens.FILES, *block_cases.FILES])
def test_tokens_and_forwards_equal_the_reference(model):
    recorded.check_blocks(model)


@pytest.mark.parametrize("model", ["sdar", "llada2.1"])
def test_single_block_steps_while_many_requests_run(model):
    """Steps of one block each between steps of whole canvases.

    Requests bring block lengths of their own here, so most of these steps are in piecewise graphs.
    """
    counts = []
    for case, output in recorded.decode_blocks(model, {"commit_alone_from": 3}):
        completion = output.outputs[0]
        assert list(completion.token_ids) == case["output_ids"], case["id"]
        counts.append(sum(completion.spec_decode_metrics.histogram))
    # Alone, a commit shares its forward with the next block; together, it takes one of its own.
    assert sum(counts[: len(counts) // 2]) < sum(counts[len(counts) // 2 :])
