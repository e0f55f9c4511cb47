"""The `unified` layout on FlexAttention, the readable reference path: recorded decodes, fp32."""

import pytest
import recorded


@pytest.mark.parametrize("model", ["sdar", "llada2.0"])
def test_absolute_grid(model):
    """Two requests at a time have more segments, and so sequences, than vLLM's buffers hold."""
    options = {
        "attention_backend": "FLEX_ATTENTION",
        "enforce_eager": True,
        "max_num_seqs": 2,
    }
    recorded.check_blocks(model, **options)
