"""List the features of a step in the order in which they act.

A new feature is a file beside this one and an entry of :attr:`StepFeatures.entries`: see
``docs/add-a-feature.md``.
"""

from typing import Any

import numpy as np
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

from dllm_plugin.sampling.proposer import Proposer
from dllm_plugin.sampling.step import LogitsRows
from dllm_plugin.state.canvas_states import CanvasStates

from .automata import Automata
from .bad_words import BadWords
from .feature import ONCE, StepFeature
from .first_token import FirstTokenAfterPrompt, FirstTokenDecoder
from .grammars import StagedChecks, VerifiedRows
from .logprobs import LogprobStash
from .penalties import Penalties
from .structure import StructureEdits
from .templates import Targets, TemplateSteps
from .thinking import ThinkingBudget
from .watched_rows import WatchedRows


class StepFeatures:
    """Order the features, and call the verbs of all of them.

    Moments follow the order of `entries`, but for `restrict`, which runs from the last entry to the
    first: an earlier entry has the last word on what is unmasked.

    entries  all features of this engine
    """

    def __init__(
        self,
        states: CanvasStates,
        owner: Any,
        model_config: ModelConfig,
        rows: LogitsRows,
        proposer: Proposer,
    ) -> None:
        """Make the features.

        Args:
            owner: vLLM's sampler, of which the states of requests are read.
        """
        rules, method = proposer.rules, states.config.method
        kind = VerifiedRows if method.verifies else StagedChecks
        checks = kind(states, rows, rules)
        penalties = Penalties(states, owner.req_states, rules.vocab_size)
        bad_words = BadWords(states, owner.req_states)
        logprobs = LogprobStash(states, model_config)
        entries: list[StepFeature] = []
        if method.inserts:
            # Plans before all others, and moves tokens after all others.
            entries.append(StructureEdits(states, proposer))
        entries += [
            # Tables that kernels read: first, since other features read them, too.
            rules,
            # Changes the canvas, which all others read, and unmasks its frontier whatever the
            # others withhold.
            checks,
            # Counts the tokens of that canvas, and changes logits before others ban ids.
            penalties,
            # Withholds positions, also those with a target.
            bad_words,
            # Adds to what policies unmask, and replaces tokens before they are scored.
            Targets(states),
            # Extends what is committed: before everything that moves on with the canvas.
            TemplateSteps(states),
            # Adds rows, to which no bad words apply, and moves on by what is committed.
            Automata(states, owner.sampling_states, rows, rules, penalties),
            # Stores the scores of this step's rows, and emits them.
            logprobs,
        ]
        if states.config.dedicated_commit or method.causal_commit:
            # Reads rows once more, with scores of their own: after the scores of the step.
            decoder = FirstTokenAfterPrompt if method.causal else FirstTokenDecoder
            readers = [entry for entry in entries if entry.reads != ONCE]
            entries.append(decoder(states, checks, readers, logprobs, proposer))
        if method.causal_commit:
            # Replaces first tokens of blocks: after they are decided.
            entries.append(ThinkingBudget(states))
        # Appends rows to the log-probabilities: after everything that emits them.
        entries.append(WatchedRows(states))
        self.entries = tuple(entries)

    def __getitem__(self, kind: type[Any]) -> Any:
        """Return the entry of a class or of what derives from it."""
        return next(entry for entry in self.entries if isinstance(entry, kind))

    def active(self, slots_np: np.ndarray) -> tuple[StepFeature, ...]:
        """Return the features that requests in these slots use."""
        return tuple([entry for entry in self.entries if entry.active(slots_np)])

    def add_request(self, slot: int, params: SamplingParams) -> int:
        """Stage a request with every feature; return how its rows are read."""
        reads = 0
        for entry in self.entries:
            entry.free(slot)
            uses = entry.add_request(slot, params)
            entry.mark(slot, uses)
            if uses:
                reads = max(reads, entry.reads)
        return reads

    def remove_request(self, slot: int) -> None:
        """Free a slot in every feature that its request used."""
        for entry in self.entries:
            entry.free(slot)

    def apply_staged_writes(self) -> None:
        """Copy what requests have staged to the device."""
        for entry in self.entries:
            entry.apply_staged_writes()
