"""Scripts that play the model: the logits of a position by what it sees."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from bank import rows_far_apart
from vllm.platforms import current_platform

if current_platform.is_cpu():
    # What vLLM's CPU worker imports first: buffers without pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401


VOCAB, MASK, EOS = 16, 15, 14

Script = Callable[[list[int], int], np.ndarray]


class Table:
    """Fixed (token, probability) per position; the rest is spread evenly over the other ids.

    A probability may be ``(p, second token, its p)``.
    """

    def __init__(
        self, token: Callable[[int], int], probability: Callable[[int], Any]
    ) -> None:
        self.token, self.probability = token, probability

    def __call__(self, visible: list[int], position: int) -> np.ndarray:
        p = self.probability(position)
        p, second, second_p = p if isinstance(p, tuple) else (p, None, 0.0)
        others, rest = VOCAB - 1 - (second is not None), 1 - p - second_p
        row = np.full(
            VOCAB, np.log(rest / others) if rest > 0 else -1e9, dtype=np.float32
        )
        row[self.token(position)] = np.log(p)
        if second is not None:
            row[second] = np.log(second_p)
        return row


BANK = rows_far_apart(VOCAB, MASK)


class Hashed:
    """Rows drawn from :data:`BANK` by a hash of the position and of everything visible."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, visible: list[int], position: int) -> np.ndarray:
        key = zlib.crc32(bytes((self.seed % 251, position, len(visible), *visible)))
        return BANK[key % len(BANK)]


def visible(query: int, prompt: int, block_length: int, limit: int) -> int:
    """Keys that a row sees under the block-causal mask; the prompt is the first block."""
    block = max(query - prompt, -1) // block_length
    return min(prompt + (block + 1) * block_length, limit)
