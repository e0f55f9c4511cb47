"""Map token ids to their bytes and texts to ids."""

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

WORD = 32  # bits of an int32, one per id
CLOSERS = b'"}])>'
LAST = b"{[(<\\ \n\t\r-"
DIGITS = range(48, 58)
PRINTED = [
    b for b in range(33, 127) if b not in CLOSERS and b not in LAST and b not in DIGITS
]
# What ends a text soonest comes first; openers and white space, which postpone its end, last.
BYTE_ORDER = bytes([*CLOSERS, *DIGITS, *PRINTED, *LAST, *range(128, 256)])
# UTF-8 has no surrogates.
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
LONGEST = 16  # bytes of a token in a cut of ours


class Vocabulary:
    """Store the bytes of one tokenizer's ids.

    pieces    bytes of each id; empty for ids that spell nothing
    never     bool per id: special ids and surrogates, which no text may hold
    opens, shuts  bool per id: whether a surrogate may begin at its end, or end in its first byte
    by_bytes  the id of each piece of at most LONGEST bytes
    order     ids by which a search for an end tries to go on: single bytes, then short pieces
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: Iterable[int],
        encode: Callable[[str], Sequence[int]],
        fallbacks: Iterable[int] = (),
    ) -> None:
        """Build the tables; `fallbacks` are ids of single bytes that have another id as well."""
        self.pieces = list(pieces)
        self.size = len(self.pieces)
        self.never = np.array(
            [not p or SURROGATE.search(p) is not None for p in self.pieces]
        )
        self.opens = np.array([piece[-1:] == b"\xed" for piece in self.pieces])
        self.shuts = np.array(
            [b"\xa0" <= piece[:1] <= b"\xbf" for piece in self.pieces]
        )
        self.never[[i for i in special if i < self.size]] = True
        self._encode = encode
        second = set(fallbacks)
        self.by_bytes: dict[bytes, int] = {}
        for i in range(self.size - 1, -1, -1):
            piece = self.pieces[i]
            if (
                self.never[i]
                or len(piece) > LONGEST
                or (i in second and piece in self.by_bytes)
            ):
                continue
            self.by_bytes[piece] = i
        rank = {b: place for place, b in enumerate(BYTE_ORDER)}
        single = [i for piece, i in self.by_bytes.items() if len(piece) == 1]
        single.sort(key=lambda i: rank.get(self.pieces[i][0], len(rank)))
        longer = [i for piece, i in self.by_bytes.items() if len(piece) > 1]
        longer.sort(key=lambda i: (len(self.pieces[i]), i))
        self.num_single = len(single)
        self.order = np.array(single + longer, dtype=np.int64)

    @property
    def words(self) -> int:
        """Return the number of int32 words with a bit per id."""
        return -(-self.size // WORD)

    def text(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that ids spell."""
        return b"".join(self.pieces[i] for i in ids)

    def encode(self, text: bytes) -> list[int]:
        """Return the tokenizer's ids for a text; empty if they do not spell just this text."""
        try:
            ids = list(self._encode(text.decode()))
        except UnicodeDecodeError:
            return []
        spelled = all(0 <= i < self.size and not self.never[i] for i in ids)
        return ids if spelled and self.text(ids) == text else []

    def cut(self, text: bytes, longest: int = LONGEST) -> list[int]:
        """Return ids of the longest pieces from the left; empty if there are none."""
        ids, at = [], 0
        while at < len(text):
            for size in range(min(longest, len(text) - at), 0, -1):
                found = self.by_bytes.get(text[at : at + size])
                if found is not None:
                    break
            else:
                return []
            ids.append(found)
            at += size
        return ids


def pack(flags: np.ndarray, words: int) -> np.ndarray:
    """Pack a bool per id into int32 words, as grammar backends do."""
    padded = np.zeros(words * WORD, dtype=bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.int32)


def holds(row: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return which ids have their bit set in a packed row."""
    return (row[ids >> 5] >> (ids & 31)) & 1 > 0
