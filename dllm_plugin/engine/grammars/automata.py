"""Make the grammars of requests that decode by a token automaton.

Workers follow the automaton on the device, without asking; here it only says whether the text that
was emitted is valid and has ended, which vLLM asks of every grammar.
"""

import hashlib
from collections import OrderedDict

import torch
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputKey,
)

from dllm_plugin.config.request.arguments import AUTOMATON
from dllm_plugin.grammar.automaton import (
    DEAD,
    END,
    START,
    Guide,
    TooLarge,
    build,
)
from dllm_plugin.grammar.payload import AutomatonStart
from dllm_plugin.grammar.regular import expression
from dllm_plugin.grammar.vocabulary import Vocabulary

REMEMBERED = 64  # automata that are kept for later requests with the same grammar


class OwnGrammar(StructuredOutputGrammar):
    """Stand in for vLLM's grammar of a request: vLLM only feeds it emitted ids."""

    mode: str  # DRAFTS or AUTOMATON

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Raise: vLLM validates drafts of a speculator, and there is none."""
        raise AssertionError("a canvas is checked as a whole")

    def rollback(self, num_tokens: int) -> None:
        """Raise: what was emitted is never taken back."""
        raise AssertionError("committed text is final")

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Raise: no step of a canvas reads a bitmask of vLLM's."""
        raise AssertionError("a canvas has no bitmask of vLLM's")

    def reset(self) -> None:
        """Raise: a grammar serves one request."""
        raise AssertionError("a grammar serves one request")


class AutomatonGrammar(OwnGrammar):
    """Follow a request's automaton along what is emitted.

    state      after the emitted text
    completes  the text will be complete: one fits what is asked for
    """

    mode = AUTOMATON

    def __init__(self, key: str, guide: Guide, left: int) -> None:
        self.key, self.guide = key, guide
        self.state = START
        self.completes = guide.distance(START) <= left

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Follow emitted ids; return whether the automaton takes them."""
        states = self.guide.follow(self.state, tokens)  # from END nothing goes on
        if DEAD in states:
            return False
        self.state = states[-1] if states else self.state
        return True

    def is_terminated(self) -> bool:
        """Return whether the text has ended."""
        return self.state == END

    def start(self, req_id: str) -> AutomatonStart:
        """Return what workers get when the request starts, or comes back."""
        return AutomatonStart(
            req_id, self.key, self.guide.automaton, self.state, self.completes
        )


class AutomatonCache:
    """Build the automata of one engine's requests, and keep them for later ones."""

    def __init__(self, whitespace: bool) -> None:
        """Make it; `whitespace`: whether JSON may hold blanks between its tokens."""
        self.whitespace = whitespace
        self._known: OrderedDict[str, Guide | str] = OrderedDict()

    def grammar(
        self,
        named: StructuredOutputKey,
        vocabulary: Vocabulary,
        stops: list[int],
        left: int,
    ) -> AutomatonGrammar:
        """Return the grammar of a request. Raises TooLarge if it has no automaton."""
        key, guide = self._find(named, vocabulary, stops)
        return AutomatonGrammar(key, guide, left)

    def guide(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> Guide | None:
        """Return the guide of a grammar; None if it has no automaton."""
        try:
            return self._find(named, vocabulary, stops)[1]
        except TooLarge:
            return None

    def _find(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> tuple[str, Guide]:
        """Return the name and the guide of an automaton. Raises TooLarge if there is none."""
        key = hashlib.sha256(repr((named, sorted(stops))).encode()).hexdigest()
        # Not looked up again: another thread may drop it.
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._build(named, vocabulary, stops)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        if isinstance(found, str):
            raise TooLarge(found)
        return key, found

    def _build(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> Guide | str:
        """Return the guide of an automaton, or why there is none."""
        kind, spec = named
        asked = expression(kind.name.lower(), spec, self.whitespace)
        if asked is None:
            return f"this {kind.name.lower()} is not regular"
        try:
            return Guide(build(asked, vocabulary, stops))
        except TooLarge as error:
            return str(error)
