"""Top-k and top-p from sorted logits keep what vLLM's own filter keeps."""

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from dllm_plugin.sampling.filters import keep_by_order

ROWS, VOCAB = 24, 500


def random_rows(kind: str, generator: torch.Generator) -> torch.Tensor:
    logits = 4 * torch.randn(ROWS, VOCAB, generator=generator)
    if kind == "ties":  # 16 bits hold few values
        logits = logits.to(torch.bfloat16).float().round()
    if kind == "banned":
        logits.masked_fill_(
            torch.rand(logits.shape, generator=generator) < 0.7, float("-inf")
        )
    if kind == "broken":
        logits[::3, 7], logits[1::3, 9] = float("nan"), float("inf")
    return logits


@pytest.mark.parametrize("kind", ["usual", "ties", "banned", "broken"])
@pytest.mark.parametrize("with_top_k", [False, True])
def test_equal_to_vllm(kind: str, with_top_k: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = random_rows(kind, generator)
        top_p = torch.rand(ROWS, generator=generator)
        top_p[0], top_p[1] = 1.0, 1e-9
        top_k = (
            torch.randint(1, VOCAB + 1, (ROWS,), generator=generator)
            if with_top_k
            else None
        )
        expected = apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p)
        got = keep_by_order(logits.clone(), top_k, top_p)
        if kind == "ties":
            # Which of them stay is left to an unstable sort there; how many is not.
            assert torch.equal(got.sort(dim=-1).values, expected.sort(dim=-1).values)
        else:
            assert torch.equal(got.nan_to_num(7e7), expected.nan_to_num(7e7))


def test_of_ties_lower_ids_stay() -> None:
    kept = keep_by_order(torch.zeros(1, 8), None, torch.tensor([0.4]))
    assert kept.isfinite().nonzero()[:, 1].tolist() == [0, 1, 2, 3]
