"""Scripted models decoded under grammars of vLLM's own backends, by the real states and sampler."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from grammar_cases import Case
from scripted import Loop, Run, sampling
from scripted_rows import Script
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from dllm_plugin.config.decode import DecodeConfig, get_decode_config
from dllm_plugin.config.request.arguments import DRAFTS, GRAMMAR
from dllm_plugin.engine.grammars.automata import AutomatonGrammar, OwnGrammar
from dllm_plugin.engine.grammars.grammars import CanvasGrammar, Grammars
from dllm_plugin.grammar.state import GrammarState
from dllm_plugin.grammar.step import pack_checks
from dllm_plugin.sampling.features.automata import Automata
from dllm_plugin.sampling.features.grammars import StagedChecks

MODEL = Path(__file__).parents[1] / "dllm_plugin" / "default_model"
EOS, MASK, VOCAB = 485, 486, 512
CONTEXT = 256


class GrammarLoop(Loop):
    """Decode with the bundled model's vocabulary; requests may have a grammar."""

    vocab, mask, eos = VOCAB, MASK, EOS

    def __init__(
        self,
        dllm: dict[str, Any],
        shift: bool = False,
        config: DecodeConfig | None = None,
    ) -> None:
        super().__init__(dllm, shift, max_model_len=CONTEXT, config=config)
        self.grammars: dict[str, CanvasGrammar] = {}
        self.automata: dict[str, AutomatonGrammar] = {}

    def begin(
        self,
        script: Script,
        params: Any,
        grammar: OwnGrammar | None,
        prompt: Sequence[int] = (5, 6, 7),
    ) -> Run:
        """Admit a request."""
        run = self.start(list(prompt), script, params)
        if isinstance(grammar, CanvasGrammar):
            self.grammars[run.req_id] = grammar
        elif isinstance(grammar, AutomatonGrammar):
            self.automata[run.req_id] = grammar
        return run

    def before_sampling(self, canvases: list[Run], prefills: list[Run]) -> None:
        """Check the canvases as the scheduler does."""
        starts = [
            self.automata[r.req_id].start(r.req_id)
            for r in prefills
            if r.req_id in self.automata
        ]
        if starts:
            self.sampler.features[Automata].start(starts)
        ids = [run.req_id for run in canvases + prefills if run.req_id in self.grammars]
        if not ids:
            return
        grammars = [self.grammars[i] for i in ids]
        checks = [grammar.state.check(grammar.canvas) for grammar in grammars]
        writes = [grammar.state.writes for grammar in grammars]
        words = grammars[0].state.vocabulary.words
        self.sampler.features[StagedChecks].stage(
            pack_checks(ids, checks, writes, words)
        )

    def after_sampling(self, run: Run, canvas: list[int], emitted: list[int]) -> None:
        """Keep the rest of the canvas, and feed the grammar what is emitted."""
        grammar = self.grammars.get(run.req_id)
        if grammar is not None:
            grammar.canvas = [-1 if i == MASK else i for i in canvas[len(emitted) :]]
            assert grammar.accept_tokens(run.req_id, emitted)
        if run.req_id in self.automata:
            assert self.automata[run.req_id].accept_tokens(run.req_id, emitted)


class Compiler:
    """Compile grammars as an engine does, on vLLM's threads."""

    def __init__(self, backend: str) -> None:
        config = EngineArgs(
            str(MODEL), dtype="float32", enforce_eager=True, max_model_len=CONTEXT
        ).create_engine_config()
        self.backend = backend
        self.manager = StructuredOutputManager(config)
        self.grammars = Grammars(self.manager, get_decode_config(config), CONTEXT)

    def compile(self, kind: str, spec: Any, params: Any, backend: str = "") -> Any:
        """Return the grammar of a request with these parameters: an OwnGrammar.

        `backend`: what vLLM has chosen for the request; by default the engine's.

        Raises what the compilation raises.
        """
        # What tests of checks and drafts ask for, unless they say otherwise.
        params.extra_args.setdefault(GRAMMAR, DRAFTS)
        asked = StructuredOutputsParams(**{kind: spec})
        asked._backend, asked._backend_was_auto = backend or self.backend, True
        params.structured_outputs = asked
        if kind == "choice" and self.backend == "xgrammar":
            from vllm.v1.structured_output.utils import choice_as_grammar

            asked.grammar, asked.choice = choice_as_grammar(spec), None
        request = Request("a", [5, 6, 7], params, None)
        self.grammars.forget(request.request_id)  # they all have one id
        self.manager.grammar_init(request)
        ours = request.structured_output_request
        assert ours is not None
        while not isinstance(ours.grammar, CanvasGrammar | AutomatonGrammar):
            time.sleep(0.001)
            if isinstance(ours.grammar, Exception):
                raise ours.grammar
            self.grammars.prepare(request)
        return ours.grammar

    def close(self) -> None:
        """End the threads."""
        self.manager.clear_backend()


class Wants:
    """Logits that mostly want one text, with faults and shifts; random ones without a text."""

    def __init__(self, seed: int, text: list[int] | None, fault: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.text, self.fault = text, fault

    def __call__(self, visible: list[int], position: int) -> np.ndarray:
        row = self.rng.standard_normal(VOCAB).astype(np.float32)
        if self.text is not None and self.rng.random() >= self.fault:
            slip = (
                int(self.rng.integers(-1, 2)) if self.rng.random() < self.fault else 0
            )
            at = position - 3 + slip
            row[self.text[at] if 0 <= at < len(self.text) else EOS] += (
                4 + 12 * self.rng.random()
            )
        return row


def random_text(state: GrammarState, rng: random.Random, most: int) -> list[int]:
    """A random text of a grammar, or its beginning; the state stays where it is."""
    matcher, ids = state.matcher.fork(), []
    while len(ids) < most:
        if matcher.complete() and rng.random() < 0.5:
            return [*ids, EOS]
        bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
        places = np.flatnonzero(bits[:VOCAB]).tolist()
        if not places:
            return [*ids, EOS]
        ids.append(rng.choice(places))
        assert matcher.accept(ids[-1])
    return ids


def ask(max_tokens: int, **options: Any) -> Any:
    """Parameters of a request, as the front end hands them on."""
    return sampling(max_tokens, EOS, **options)


def text_of(state: GrammarState, ids: list[int]) -> str:
    """What ids spell, less the token that ended them."""
    body = ids[:-1] if ids and ids[-1] == EOS else ids
    return state.vocabulary.text(body).decode("utf-8", "replace")


def judged(case: Case, text: str) -> bool:
    """Whether the case's own judge takes a text."""
    try:
        return case.judge(text)
    except ValueError:
        return False
