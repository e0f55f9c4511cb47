"""Carry the checks of a step from the scheduler to the workers, as a few arrays."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from dllm_plugin.grammar.automaton import TokenAutomaton
from dllm_plugin.grammar.state import GrammarCheck

NO_ID = -1
NUMBERS = ("settled", "front", "rejected", "must", "writes", "chooses")


class GrammarPayload(NamedTuple):
    """Pack the checks of some requests; letters as in :mod:`dllm_plugin.grammar.step`.

    numbers_GN  int64, by the names in NUMBERS
    """

    req_ids: list[str]
    known_GK: np.ndarray
    numbers_GN: np.ndarray
    allowed_GW: np.ndarray


class AutomatonStart(NamedTuple):
    """Hand the automaton of a request to the workers, in the step with which it starts.

    key        equal for equal automata, which workers hold once
    state      after the text that was emitted before
    completes  whether its text has to be complete
    """

    req_id: str
    key: Hashable
    automaton: TokenAutomaton
    state: int
    completes: bool


def pack_checks(
    req_ids: Sequence[str],
    checks: Sequence[GrammarCheck],
    writes: Sequence[bool],
    words: int,
) -> GrammarPayload:
    """Pack checks; `writes`: whether known ids are written, `words`: int32 per row of bits."""
    known = [[*check.settled, *check.forced] for check in checks]
    known_GK = np.full((len(known), max(1, *map(len, known))), NO_ID, dtype=np.int64)
    numbers_GN = np.zeros((len(known), len(NUMBERS)), dtype=np.int64)
    allowed_GW = np.zeros((len(known), words), dtype=np.int32)
    for i, (check, ids) in enumerate(zip(checks, known, strict=True)):
        known_GK[i, : len(ids)] = ids
        chooses = check.allowed is not None
        flags = (check.rejected, check.must, writes[i], chooses)
        numbers_GN[i] = (len(check.settled), len(ids), *flags)
        if check.allowed is not None:
            allowed_GW[i] = check.allowed
    return GrammarPayload(list(req_ids), known_GK, numbers_GN, allowed_GW)
