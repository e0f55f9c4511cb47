"""Two stages on two GPUs give the reference's tokens: fp32, Triton attention, graphs and eager."""

import pytest
import recorded
import torch

FULL = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
EAGER = {"enforce_eager": True}
CHECKS = {
    "sdar-eager": (recorded.check_blocks, EAGER, "sdar"),
    "sdar": (recorded.check_blocks, FULL, "sdar"),
    "full-eager": (recorded.check_full, EAGER, "llada", "prefix_cache"),
    "d2f-dream": (recorded.check_d2f, FULL, "d2f_dream"),
    "stable-diffcoder": (recorded.check_blocks, FULL, "stable-diffcoder"),
    "llada2.1-eager": (recorded.check_blocks, EAGER, "llada2.1"),
    "llada2.1": (recorded.check_blocks, FULL, "llada2.1"),
    "sdar-moe-eager": (recorded.check_blocks, EAGER, "sdar-moe"),
    "sdar-moe": (recorded.check_blocks, FULL, "sdar-moe"),
    "llada2.0": (recorded.check_blocks, FULL, "llada2.0"),
    "llada-moe-eager": (recorded.check_full, EAGER, "llada-moe", "dual_cache"),
    "llada-moe": (recorded.check_full, FULL, "llada-moe", "dual_cache"),
    "rnd1-eager": (recorded.check_full, EAGER, "rnd1", "semi_autoregressive"),
    "fast-eager": (recorded.check_blocks, EAGER, "fast-dllm-v2-tied"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_tokens_and_forwards_equal_the_reference(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check, options, *what = CHECKS[name]
    check(*what, pipeline_parallel_size=2, **options)
