"""Make the grammars of requests that decode by a token automaton.

Workers follow the automaton on the device, without asking; here it only says whether the text that
was emitted is valid and has ended, which vLLM asks of every grammar. The messages between scheduler
and workers about requests with a grammar stand here, too.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import ModelRunnerOutput
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
from dllm_plugin.grammar.schemas import expression
from dllm_plugin.grammar.step import AutomatonStart, GrammarPayload, RowsPayload
from dllm_plugin.grammar.vocabulary import Vocabulary

# Automata that are kept for later requests with the same grammar.
REMEMBERED = 64


class OwnGrammar(StructuredOutputGrammar):
    """Stand in for vLLM's grammar of a request: vLLM only feeds it emitted ids."""

    mode = ""  # DRAFTS or AUTOMATON

    def _unasked(self, *arguments: Any, **named: Any) -> Any:
        """Raise: canvases are checked as a whole, and what is emitted is final."""
        raise AssertionError("vLLM asks this of no grammar of a canvas")

    accept_tokens = is_terminated = _unasked  # until a grammar is compiled
    validate_tokens = rollback = fill_bitmask = reset = _unasked


class AutomatonGrammar(OwnGrammar):
    """Follow a request's automaton along what is emitted.

    state      after the emitted text
    completes  the text will be complete: one fits what is asked for
    """

    mode = AUTOMATON

    def __init__(self, guide: Guide, left: int) -> None:
        self.guide = guide
        self.state = START
        self.completes = guide.distance(START) <= left

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Follow emitted ids; return whether the automaton accepts them."""
        # From END nothing goes on.
        states = self.guide.follow(self.state, tokens)
        if DEAD in states:
            return False
        self.state = states[-1] if states else self.state
        return True

    def is_terminated(self) -> bool:
        """Return whether the text has ended."""
        return self.state == END

    def start(self, req_id: str) -> AutomatonStart:
        """Return what workers get when the request starts, or comes back."""
        guide = self.guide
        return AutomatonStart(
            req_id, guide.key, guide.automaton, self.state, self.completes
        )


def remember(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Store a value for later requests, and drop the oldest values beyond `most`."""
    known[key] = value
    while len(known) > most:
        known.popitem(last=False)


class AutomatonCache:
    """Build the automata of one engine's requests, and keep them for later requests."""

    def __init__(self, whitespace: bool) -> None:
        """Build automata; `whitespace`: whether JSON may have blanks between its tokens."""
        self.whitespace = whitespace
        self._known: OrderedDict[str, Guide | str] = OrderedDict()

    def find(
        self, named: StructuredOutputKey, vocabulary: Vocabulary, stops: list[int]
    ) -> Guide:
        """Return the guide of a grammar. Raises TooLarge if it has no automaton."""
        key = hashlib.sha256(repr((named, sorted(stops))).encode()).hexdigest()
        # Looked up once: another thread may drop it.
        found: Guide | str | None = self._known.get(key)
        if found is None:
            kind, spec = named
            asked = expression(kind.name.lower(), spec, self.whitespace)
            try:
                if asked is None:
                    raise TooLarge(f"this {kind.name.lower()} is not regular")
                found = Guide(key, build(asked, vocabulary, stops))
            except TooLarge as error:
                found = str(error)
            remember(self._known, key, found, REMEMBERED)
        if isinstance(found, str):
            raise TooLarge(found)
        return found


@dataclass
class CanvasChecks(GrammarOutput):
    """Send checks of canvases to the workers instead of bitmasks, and automata that start."""

    payload: GrammarPayload | RowsPayload | None = None
    starts: list[AutomatonStart] = field(default_factory=list)


@dataclass
class CanvasOutput(ModelRunnerOutput):
    """Add canvases to the output of vLLM's runner: ids from the first uncommitted position on."""

    canvases: dict[str, list[int]] = field(default_factory=dict)
