"""Give the grammar backends of vLLM one signature. Siblings: xgrammar, llguidance.

A matcher stands at a place in a text. Stop tokens are none of its business, and not usable: a text
may end where `complete` says so.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dllm_plugin.grammar.vocabulary import WORD, Vocabulary, pack

if TYPE_CHECKING:
    import llguidance
    import xgrammar


Buffer = tuple[torch.Tensor, np.ndarray]


class Matcher(Protocol):
    """Define what checks and closings need of a grammar."""

    def accept(self, token: int) -> bool:
        """Accept an id; False, and no change, if the grammar refuses it."""

    def rollback(self, count: int) -> None:
        """Go back by so many ids."""

    def complete(self) -> bool:
        """Return whether the text so far may end."""

    def allowed(self) -> np.ndarray:
        """Return which ids may follow, as packed bits; unusable ids may not. A view: copy it."""

    def fork(self) -> "Matcher":
        """Return a matcher of its own at the same place."""


class XgrammarMatcher:
    """Match by an xgrammar matcher, which this object then owns.

    It takes an encoded surrogate for a character (0.2.8). Such bytes are no UTF-8, and a reader
    finds three characters in their place, so they are refused here.
    """

    def __init__(
        self,
        matcher: "xgrammar.GrammarMatcher",
        usable: np.ndarray,
        vocabulary: Vocabulary,
        buffer: Buffer | None = None,
        opened: Sequence[bool] = (False,),
    ) -> None:
        """Take over a matcher; `usable`: bool per id, whether a text may hold it."""
        self.matcher, self.usable, self.vocabulary = matcher, usable, vocabulary
        self._buffer = buffer or _make_buffer(usable)
        self._opened = [*opened]  # after each id: whether a surrogate may have begun

    def accept(self, token: int) -> bool:
        """Accept an id; False, and no change, if the grammar refuses it."""
        if not self.usable[token] or (
            self._opened[-1] and self.vocabulary.shuts[token]
        ):
            return False
        taken = bool(self.matcher.accept_token(token))
        if taken:
            self._opened.append(bool(self.vocabulary.opens[token]))
        return taken

    def rollback(self, count: int) -> None:
        """Go back by so many ids."""
        if count:
            self.matcher.rollback(count)
            del self._opened[-count:]

    def complete(self) -> bool:
        """Return whether the text so far may end."""
        return bool(self.matcher.is_completed())

    def allowed(self) -> np.ndarray:
        """Return which ids may follow, as packed bits; unusable ids may not. A view: copy it."""
        bits, keep = self._buffer
        self.matcher.fill_next_token_bitmask(bits, 0)
        row = bits[0].numpy()
        row &= keep
        if self._opened[-1]:
            row &= ~pack(self.vocabulary.shuts, len(row))
        return row

    def fork(self) -> "XgrammarMatcher":
        """Return a matcher of its own at the same place."""
        fork = self.matcher.fork()
        return XgrammarMatcher(
            fork, self.usable, self.vocabulary, self._buffer, self._opened[-1:]
        )


class GuidanceMatcher:
    """Match by an llguidance matcher, which this object then owns."""

    def __init__(
        self,
        matcher: "llguidance.LLMatcher",
        usable: np.ndarray,
        buffer: Buffer | None = None,
    ) -> None:
        """Take over a matcher; `usable`: bool per id, whether a text may hold it."""
        self.matcher, self.usable = matcher, usable
        self._buffer = buffer or _make_buffer(usable)

    def accept(self, token: int) -> bool:
        """Accept an id; False, and no change, if the grammar refuses it."""
        if not self.usable[token]:
            return False
        # A matcher that has met an error stays there; one that has stopped takes nothing.
        if self.matcher.is_stopped() or self.matcher.validate_tokens([token]) != 1:
            return False
        return bool(self.matcher.consume_token(token))

    def rollback(self, count: int) -> None:
        """Go back by so many ids."""
        if count:
            self.matcher.rollback(count)

    def complete(self) -> bool:
        """Return whether the text so far may end."""
        return bool(self.matcher.is_accepting())

    def allowed(self) -> np.ndarray:
        """Return which ids may follow, as packed bits; unusable ids may not. A view: copy it."""
        from llguidance.torch import fill_next_token_bitmask

        bits, keep = self._buffer
        row = bits[0].numpy()
        if self.matcher.is_stopped():
            row.fill(0)
        else:
            fill_next_token_bitmask(self.matcher, bits, 0)
        row &= keep
        return row

    def fork(self) -> "GuidanceMatcher":
        """Return a matcher of its own at the same place."""
        return GuidanceMatcher(self.matcher.deep_copy(), self.usable, self._buffer)


def _make_buffer(usable: np.ndarray) -> Buffer:
    """Return a row for a backend's bits, and the bits that may stay set in it."""
    keep = pack(usable, -(-len(usable) // WORD))
    return torch.zeros(1, len(keep), dtype=torch.int32), keep
