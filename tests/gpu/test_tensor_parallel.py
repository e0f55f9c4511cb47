"""Several GPUs give the reference's tokens: fp32, Triton attention, CUDA graphs, async.

Each model with the logits gathered and with a rank's columns sampled where they are.
"""

import pytest
import recorded
import torch

CHECKS = {
    "d2f-llada": (recorded.check_d2f, "d2f_llada"),
    "d2f-dream": (recorded.check_d2f, "d2f_dream"),
    "full": (recorded.check_full, "llada", "semi_autoregressive"),
    "sdar": (recorded.check_blocks, "sdar"),
    "llada2.1": (recorded.check_blocks, "llada2.1"),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("by_columns", [False, True], ids=["gathered", "columns"])
@pytest.mark.parametrize("name", CHECKS)
def test_tokens_and_forwards_equal_the_reference(name, by_columns, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    check, *what = CHECKS[name]
    check(*what, {"vocab_parallel": by_columns}, tensor_parallel_size=ranks)
