"""D2F decodes on a GPU: fp32, Triton attention, CUDA graphs and eager."""

import pytest
import recorded


@pytest.mark.parametrize("name", ["d2f_llada", "d2f_dream"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_and_forwards_equal_the_reference(name, eager):
    recorded.check_d2f(name, enforce_eager=eager)
