"""Hold the bad words of each slot, on the host and on the device.

The host knows which slots have words and how many; a row of the device's table holds a slot's words
one after the other, each as long as the slot's longest. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; N slots, X = MAX_WORDS_TOKENS, W words, L tokens of the longest.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.config.request_checks import MAX_WORDS_TOKENS

UNUSED = -1  # no token has this id


class WordTable:
    """Keep words from a request's start to its end, and send only those of new requests.

    tokens_NX    int32, UNUSED behind a word's end; made when a request first has words, and given
                 back with the last one's
    count_np     int64 ``[N]``, words of a slot
    length_np    int64 ``[N]``, tokens of its longest word
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.tokens_NX: Tensor | None = None
        self.count_np = np.zeros(num_slots, dtype=np.int64)
        self.length_np = np.zeros(num_slots, dtype=np.int64)
        self._new: dict[int, np.ndarray] = {}

    def add(self, slot: int, words: list[list[int]]) -> None:
        """Stage a slot's words; none if it has none."""
        self.remove(slot)
        if not words:
            return
        length = max(map(len, words))
        row_np = np.full((len(words), length), UNUSED, dtype=np.int32)
        for i, word in enumerate(words):
            row_np[i, : len(word)] = word
        assert row_np.size <= MAX_WORDS_TOKENS, "admission refuses more"
        self.count_np[slot], self.length_np[slot] = row_np.shape
        self._new[slot] = row_np.reshape(-1)

    def remove(self, slot: int) -> None:
        """Forget a slot's words."""
        self._new.pop(slot, None)
        self.count_np[slot] = self.length_np[slot] = 0
        if self.tokens_NX is not None and not self.count_np.any():
            self.tokens_NX = None

    def apply_staged_writes(self) -> None:
        """Copy the words of new requests to the device."""
        if not self._new:
            return
        if self.tokens_NX is None:
            shape = (len(self.count_np), MAX_WORDS_TOKENS)
            self.tokens_NX = torch.full(shape, UNUSED, dtype=torch.int32, device=self.device)
        rows_np = np.full((len(self._new), MAX_WORDS_TOKENS), UNUSED, dtype=np.int32)
        for i, row_np in enumerate(self._new.values()):
            rows_np[i, : len(row_np)] = row_np
        slots = async_tensor_h2d(np.array([*self._new], dtype=np.int64), device=self.device)
        self.tokens_NX[slots] = async_tensor_h2d(rows_np, device=self.device)
        self._new.clear()

    def words_of(self, slots_R: Tensor, slots_np: np.ndarray) -> Tensor:
        """Return the words of some slots, int32 ``[R, W, L]``, UNUSED where they have fewer."""
        assert self.tokens_NX is not None
        counts_np, lengths_np = self.count_np[slots_np], self.length_np[slots_np]
        sizes = async_tensor_h2d(np.stack([counts_np, lengths_np]), device=self.device)
        count_R11, length_R11 = sizes[:, :, None, None]
        word_W1 = torch.arange(int(counts_np.max()), device=self.device)[:, None]
        place_L = torch.arange(int(lengths_np.max()), device=self.device)
        index_RWL = (word_W1 * length_R11 + place_L).clamp_max(MAX_WORDS_TOKENS - 1)
        words_RX = self.tokens_NX[slots_R].gather(1, index_RWL.flatten(1))
        exists_RWL = (word_W1 < count_R11) & (place_L < length_R11)
        return words_RX.view(index_RWL.shape).where(exists_RWL, UNUSED)
