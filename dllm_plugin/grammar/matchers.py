"""Give the matchers of xgrammar and llguidance one signature.

Stop tokens are not usable: whether a text may end is what `complete` returns.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .vocabulary import WORD, Vocabulary, pack

# A row for a backend's bits, and the bits that may stay set in it.
Buffer = tuple[Tensor, np.ndarray]


class Matcher:
    """Stand at a place in a text of a grammar.

    matcher  of the backend, which this object then owns
    usable   bool per id, whether a text may have it
    """

    def __init__(
        self, matcher: Any, usable: np.ndarray, buffer: Buffer | None = None
    ) -> None:
        self.matcher, self.usable = matcher, usable
        if buffer is None:
            keep = pack(usable, -(-len(usable) // WORD))
            buffer = torch.zeros(1, len(keep), dtype=torch.int32), keep
        self._buffer = buffer

    def accept(self, token: int) -> bool:
        """Accept an id; False, and no change, if the grammar refuses it."""
        return bool(self.usable[token]) and self._accept(token)

    def rollback(self, count: int) -> None:
        """Go back by so many ids."""
        if count:
            self.matcher.rollback(count)

    def allowed(self) -> np.ndarray:
        """Return which ids may follow, as packed bits; unusable ids may not. A view: copy it."""
        bits, keep = self._buffer
        row = bits[0].numpy()
        self._fill(bits)
        row &= keep
        return row

    def complete(self) -> bool:
        """Return whether the text so far may end."""
        raise NotImplementedError

    def fork(self) -> Self:
        """Return a matcher of its own at the same place."""
        raise NotImplementedError

    def _accept(self, token: int) -> bool:
        raise NotImplementedError

    def _fill(self, bits: Tensor) -> None:
        """Write which ids the grammar accepts here."""
        raise NotImplementedError


class XgrammarMatcher(Matcher):
    """Match by an xgrammar matcher.

    It takes an encoded surrogate for a character (0.2.8). Such bytes are no UTF-8, and a reader
    finds three characters in their place, so they are refused here.
    """

    def __init__(
        self,
        matcher: Any,
        usable: np.ndarray,
        vocabulary: Vocabulary,
        buffer: Buffer | None = None,
        opened: Sequence[bool] = (False,),
    ) -> None:
        super().__init__(matcher, usable, buffer)
        self.vocabulary = vocabulary
        # After each id: whether a surrogate may have begun.
        self._opened = [*opened]

    def _accept(self, token: int) -> bool:
        if self._opened[-1] and self.vocabulary.shuts[token]:
            return False
        taken = bool(self.matcher.accept_token(token))
        if taken:
            self._opened.append(bool(self.vocabulary.opens[token]))
        return taken

    def rollback(self, count: int) -> None:
        """Go back by so many ids."""
        super().rollback(count)
        del self._opened[len(self._opened) - count :]

    def complete(self) -> bool:
        """Return whether the text so far may end."""
        return bool(self.matcher.is_completed())

    def _fill(self, bits: Tensor) -> None:
        self.matcher.fill_next_token_bitmask(bits, 0)
        if self._opened[-1]:
            row = bits[0].numpy()
            row &= ~pack(self.vocabulary.shuts, len(row))

    def fork(self) -> Self:
        """Return a matcher of its own at the same place."""
        fork, last = self.matcher.fork(), self._opened[-1:]
        return type(self)(fork, self.usable, self.vocabulary, self._buffer, last)


class GuidanceMatcher(Matcher):
    """Match by an llguidance matcher."""

    def _accept(self, token: int) -> bool:
        # A matcher stays where it met an error; a stopped one accepts nothing.
        if self.matcher.is_stopped() or self.matcher.validate_tokens([token]) != 1:
            return False
        return bool(self.matcher.consume_token(token))

    def complete(self) -> bool:
        """Return whether the text so far may end."""
        return bool(self.matcher.is_accepting())

    def _fill(self, bits: Tensor) -> None:
        from llguidance.torch import fill_next_token_bitmask

        if self.matcher.is_stopped():
            bits.zero_()
        else:
            fill_next_token_bitmask(self.matcher, bits, 0)

    def fork(self) -> Self:
        """Return a matcher of its own at the same place."""
        return type(self)(self.matcher.deep_copy(), self.usable, self._buffer)
