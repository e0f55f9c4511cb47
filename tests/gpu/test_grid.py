"""SDAR, LLaDA2, Fast-dLLM v2 on a GPU: fp32, Triton attention, full CUDA graphs, async."""

import pytest
import recorded
import test_block_goldens
import test_grid_goldens


@pytest.mark.parametrize("model", [*test_grid_goldens.FILES, *test_block_goldens.FILES])
def test_tokens_and_forwards_equal_the_reference(model):
    recorded.check_blocks(model)
