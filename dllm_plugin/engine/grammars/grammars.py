"""Connect vLLM's structured outputs with the state of grammars on canvases.

A request's grammar is compiled by a backend of vLLM's, in a thread of vLLM's, before the request is
first scheduled. vLLM feeds it what is emitted, and it checks canvases.
"""

import contextlib
import json
from collections import OrderedDict
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputKey,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.request.arguments import AUTO, AUTOMATON, DRAFTS, GRAMMAR
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.config.request.structured_outputs import no_automaton
from dllm_plugin.config.validation import shown
from dllm_plugin.grammar.automaton import Guide, TooLarge
from dllm_plugin.grammar.chart import Chart
from dllm_plugin.grammar.matchers import GuidanceMatcher, Matcher, XgrammarMatcher
from dllm_plugin.grammar.schemas import is_choice
from dllm_plugin.grammar.state import GrammarState
from dllm_plugin.grammar.verified import VerifiedState
from dllm_plugin.grammar.vocabulary import Vocabulary

from .automata import AutomatonCache, AutomatonGrammar, OwnGrammar, remember
from .backends import Backends, Uncompiled, read_chart

logger = init_logger("vllm.dllm_plugin")

# First closings that are kept for later requests with the same grammar.
REMEMBERED = 256


class CanvasGrammar(OwnGrammar):
    """Follow a request's grammar, and store the last known ids of its canvas.

    canvas   ids from the first uncommitted position on, -1 if undecided
    is_kept  workers keep this canvas also while the request is preempted
    """

    mode = DRAFTS

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.canvas: list[int] = []
        self.is_kept = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Follow emitted ids."""
        return self.state.commit(tokens)

    def is_terminated(self) -> bool:
        """Return whether the text has ended."""
        return self.state.ended


class Grammars:
    """Create the grammars of one engine's requests."""

    def __init__(
        self, manager: StructuredOutputManager, config: DecodeConfig, context: int
    ) -> None:
        self.manager = manager
        self.config = config
        self.context = context
        settings = manager.vllm_config.structured_outputs_config
        self.has_blanks = not settings.disable_any_whitespace
        self.automata = AutomatonCache(self.has_blanks)
        # Without a tokenizer vLLM refuses every request with a grammar.
        if not manager.vllm_config.model_config.skip_tokenizer_init:
            manager.backend = self.backends = Backends(
                manager.vllm_config, manager.tokenizer
            )
        # Waiting requests whose grammar is ours, or its error.
        self._prepared: set[str] = set()
        self.vocabulary: Vocabulary | None = None
        self._charts: OrderedDict[Any, Chart | None] = OrderedDict()
        # Largest room in which no closing was found, and a closing.
        self._closings: OrderedDict[Any, tuple[int, list[int] | None]] = OrderedDict()

    def prepare(self, request: Request) -> None:
        """Compile a request's grammar and search the first closing, both in a thread of vLLM's."""
        ours = request.structured_output_request
        assert ours is not None
        if (
            not isinstance(ours.grammar, Uncompiled)
            or request.request_id in self._prepared
        ):
            return
        self._prepared.add(request.request_id)
        made: Future[StructuredOutputGrammar] = self.manager.executor.submit(
            self._make, request
        )
        parallel = self.manager.vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            # Every rank schedules for itself there, so all have to be ready in the same step.
            wait([made])
        ours.grammar = made

    def forget(self, req_id: str) -> None:
        """Forget a request that runs no more."""
        self._prepared.discard(req_id)

    def _make(self, request: Request) -> OwnGrammar:
        params = request.sampling_params
        assert params is not None and params.max_tokens is not None
        if self.vocabulary is None:
            self.vocabulary = read_vocabulary(
                self.manager.tokenizer,
                self.manager.vllm_config.model_config.get_vocab_size(),
                self.config.mask_token_id,
            )
        vocabulary = self.vocabulary
        ends = [params.eos_token_id, *(params.stop_token_ids or ())]
        stops = [
            i for i in dict.fromkeys(ends) if i is not None and 0 <= i < vocabulary.size
        ]
        if not stops:
            raise ValueError(
                "structured_outputs needs a token that ends the text: give stop_token_ids, or "
                "serve a checkpoint with an EOS token."
            )
        left = min(params.max_tokens, self.context - request.num_prompt_tokens)
        automaton = self._automaton(request, stops, left)
        if automaton is not None:
            return automaton
        usable = ~vocabulary.never
        usable[self._special_ids_of(request)] = True
        config = self.config
        usable[[*stops, config.mask_token_id, *config.structure_token_ids]] = False
        matcher = matcher_of(self.backends.compile(request), usable, vocabulary)
        named = _named(request)
        guide = None
        with contextlib.suppress(TooLarge):
            guide = self.automata.find(named, vocabulary, stops)
        kind = VerifiedState if self.config.method.verifies else GrammarState
        state = kind(
            matcher,
            vocabulary,
            stops,
            left,
            writes=params.logprobs is None,
            guide=guide,
            chart=self._chart(named, matcher, guide),
        )
        self._find_closing(request, state)
        return CanvasGrammar(state)

    def _chart(
        self, named: StructuredOutputKey, matcher: Matcher, guide: Guide | None
    ) -> Chart | None:
        """Return the chart of a grammar; None if a guide knows all texts."""
        assert self.vocabulary is not None
        # Backends accept JSON that automata do not know: line breaks, escapes.
        if guide is not None and named[0] != StructuredOutputOptions.JSON:
            return None
        key = named, isinstance(matcher, XgrammarMatcher)
        if key not in self._charts:
            chart = read_chart(named, self.vocabulary, self.has_blanks, key[1])
            remember(self._charts, key, chart, REMEMBERED)
        return self._charts.get(key)

    def _find_closing(self, request: Request, state: GrammarState) -> None:
        """Find the first closing, or reuse that of an earlier request with this grammar."""
        key = _named(request), tuple(state.stops)
        failed, known = self._closings.get(key, (0, None))
        # What was not found in as much room is not searched again.
        state.find_closing(known, searches=state.left > failed)
        if state.completes:
            known = state.witness
        else:
            failed = max(failed, state.left)
            _warn_of_beginning(request, state.left)
        remember(self._closings, key, (failed, known), REMEMBERED)

    def _automaton(
        self, request: Request, stops: list[int], left: int
    ) -> AutomatonGrammar | None:
        """Return a request's automaton; None if the request decodes by drafts."""
        params = request.sampling_params
        assert params is not None and self.vocabulary is not None
        asked = arguments_of(self.config, params)
        named = _named(request)
        # By drafts more answers have the right number, but those of a choice.
        decides = is_choice(named[0].name.lower(), named[1])
        if asked.grammar == DRAFTS or (asked.grammar == AUTO and not decides):
            return None
        refusal = no_automaton(params, asked, self.config)
        if not refusal:
            try:
                guide = self.automata.find(named, self.vocabulary, stops)
            except TooLarge as error:
                refusal = str(error)
            else:
                grammar = AutomatonGrammar(guide, left)
                if not grammar.completes:
                    _warn_of_beginning(request, left)
                return grammar
        if asked.grammar == AUTOMATON:
            raise ValueError(f"{GRAMMAR} {AUTOMATON!r} cannot be honoured: {refusal}.")
        return None

    def _special_ids_of(self, request: Request) -> list[int]:
        """Return special ids that a structural tag spells out."""
        kind, spec = _named(request)
        if kind != StructuredOutputOptions.STRUCTURAL_TAG:
            return []
        named = _strings_of(json.loads(spec))
        added = self.manager.tokenizer.get_added_vocab()
        return [i for token, i in added.items() if any(token in text for text in named)]


def _named(request: Request) -> StructuredOutputKey:
    """Return the kind and the text of a request's grammar."""
    ours = request.structured_output_request
    assert ours is not None
    return ours.structured_output_key


def _warn_of_beginning(request: Request, left: int) -> None:
    logger.warning(
        "Request %s: no text of its grammar was found that fits max_tokens %d, so what it "
        "gets may be the beginning of one: raise max_tokens.",
        shown(request.request_id),
        left,
    )


def _strings_of(value: Any) -> list[str]:
    """Return all strings in nested JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _strings_of(item)]
    return [value] if isinstance(value, str) else []


def matcher_of(
    grammar: StructuredOutputGrammar, usable: np.ndarray, vocabulary: Vocabulary
) -> Matcher:
    """Return the matcher of a compiled grammar of vLLM's."""
    if isinstance(grammar, XgrammarGrammar):
        return XgrammarMatcher(grammar.matcher, usable, vocabulary)
    if isinstance(grammar, GuidanceGrammar):
        if grammar.ll_matcher.is_error():
            raise ValueError(grammar.ll_matcher.get_error().partition("\n")[0])
        return GuidanceMatcher(grammar.ll_matcher, usable)
    raise ValueError(
        f"structured_outputs backend {type(grammar).__name__} cannot go back, which a canvas that "
        "is decided out of order needs: serve with --structured-outputs-config.backend xgrammar "
        "or guidance."
    )


def read_vocabulary(tokenizer: Any, vocab_size: int, mask_token_id: int) -> Vocabulary:
    """Read the bytes of every id from a tokenizer of Hugging Face."""
    import xgrammar

    pieces = list(
        xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size
        ).decoded_vocab
    )
    pieces += [b""] * (vocab_size - len(pieces))
    added = tokenizer.added_tokens_decoder
    special = {i for i, token in added.items() if token.special} | {mask_token_id}
    special |= set(tokenizer.all_special_ids)
    spelled = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), vocab_size)))
    fallbacks = [
        i for i, token in enumerate(spelled) if (token or "").startswith("<0x")
    ]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Vocabulary(pieces[:vocab_size], special, encode, fallbacks)
