"""The best token but for three: the Triton kernel against the plain-torch reference."""

from itertools import product
from typing import Any

import pytest
import torch

from dllm_plugin.kernels.best_token import best_token_reference

KERNEL = "dllm_plugin.kernels.best_token.best_token"


def case(vocab: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows of few values, which tie; some are wanted, and bans name the best token."""
    generator = torch.Generator().manual_seed(vocab)
    shape = (9, vocab)
    logits = torch.randint(-5, 5, shape, generator=generator).to(dtype)
    logits[3] = float("-inf")
    row = torch.randint(0, 9, (40,), generator=generator)
    wanted = torch.rand(40, generator=generator) < 0.6
    banned = torch.randint(0, vocab, (40, 3), generator=generator)
    banned[::2, 0] = logits[row[::2]].argmax(dim=1)
    bias = torch.randint(-5, 5, (4, vocab), generator=generator).to(torch.float32)
    bias[1] = float("-inf")
    return [logits, row, wanted, banned, bias, torch.arange(40) % 4]


@pytest.mark.parametrize("vocab", [5, 8192, 20001])
def test_the_kernel_agrees_with_the_reference(vocab: int, interpreter: Any) -> None:
    for dtype, has_bias in product((torch.float32, torch.bfloat16), (False, True)):
        arguments: list[Any] = case(vocab, dtype)
        arguments[4] = arguments[4] if has_bias else None
        [found] = interpreter.run([(KERNEL, None, arguments, {})])
        expected = best_token_reference(*arguments)
        assert found.tolist() == expected.tolist()
        assert not found[~arguments[2]].any() and found.any()
