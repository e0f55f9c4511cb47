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
    TokenAutomaton,
    TooLarge,
    build,
)
from dllm_plugin.grammar.guide import Guide
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
        self._known: OrderedDict[str, TokenAutomaton | str] = OrderedDict()
        self._guides: OrderedDict[str, Guide] = OrderedDict()

    def grammar(
        self,
        named: StructuredOutputKey,
        vocabulary: Vocabulary,
        stops: list[int],
        left: int,
    ) -> AutomatonGrammar:
        """Return the grammar of a request. Raises TooLarge if it has no automaton."""
        key, automaton = self._find(named, vocabulary, stops)
        return AutomatonGrammar(key, self._guide_of(key, automaton), left)

    def guide(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> Guide | None:
        """Return the guide of a grammar; None if it has no automaton."""
        try:
            key, automaton = self._find(named, vocabulary, stops)
        except TooLarge:
            return None
        return self._guide_of(key, automaton)

    def _guide_of(self, key: str, automaton: TokenAutomaton) -> Guide:
        guide = self._guides.get(key)
        if guide is None:
            guide = self._guides[key] = Guide(automaton)
            while len(self._guides) > REMEMBERED:
                self._guides.popitem(last=False)
        return guide  # not looked up again: another thread may have dropped it

    def _find(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> tuple[str, TokenAutomaton]:
        """Return an automaton and its name. Raises TooLarge if there is none."""
        key = hashlib.sha256(repr((named, sorted(stops))).encode()).hexdigest()
        found = self._known.get(key)
        if found is None:
            found = self._build(named, vocabulary, stops)
            self._known[key] = found
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        if isinstance(found, str):
            raise TooLarge(found)
        return key, found

    def _build(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> TokenAutomaton | str:
        kind, spec = named
        asked = expression(kind.name.lower(), spec, self.whitespace)
        if asked is None:
            return f"this {kind.name.lower()} is not regular"
        try:
            return build(asked, vocabulary, stops)
        except TooLarge as error:
            return str(error)
