"""Full-attention decodes on a GPU: fp32, Triton attention, piecewise CUDA graphs and eager."""

import pytest
import recorded
from full_goldens import FILES


@pytest.mark.parametrize(("family", "strategy"), FILES, ids=str)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_and_forwards_equal_the_reference(family, strategy, eager):
    recorded.check_full(family, strategy, enforce_eager=eager)
