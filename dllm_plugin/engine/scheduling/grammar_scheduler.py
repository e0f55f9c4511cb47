"""Check canvases of requests with a grammar between two steps, where vLLM asks for bitmasks.

Under asynchronous scheduling vLLM launches a forward, waits for the result of the one before, asks
for bitmasks and only then lets the workers sample, if a request of the step has a grammar and
tokens in flight. That is the deferral that canvases need, so it is left as it is.
"""

import re
import time
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm_plugin.config.validation import shown
from dllm_plugin.engine.grammars.automata import (
    AutomatonGrammar,
    CanvasChecks,
    CanvasOutput,
    OwnGrammar,
)
from dllm_plugin.engine.grammars.grammars import CanvasGrammar, Grammars
from dllm_plugin.engine.platforms import end_with_error
from dllm_plugin.grammar.state import DeadEnd, GrammarCheck
from dllm_plugin.grammar.step import AutomatonStart, GrammarPayload, pack_checks
from dllm_plugin.grammar.verified import RowCheck, RowsPayload, pack_rows

from .reporting import Outputs, ReportingScheduler

logger = init_logger("vllm.dllm_plugin")

IDLE_SECONDS = 0.001
# Of a step without a canvas to check.
NO_BITS = np.zeros((0, 0), dtype=np.int32)


class GrammarScheduler(ReportingScheduler):
    """Schedule as vLLM does; requests with a grammar are checked as canvases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.decode_config
        method = self.decode_config.method
        self._with_grammar: set[str] = set()
        self._verifies = method.verifies
        # The prompt's last row predicts the first token of a text.
        self._predicts_first = method.accept is not None
        self._restarts = self._predicts_first or config.restarts_blocks
        # Requests with a grammar whose prompt is computed by a step in flight.
        self._prefilled: set[str] = set()
        # Why requests are about to end with an error.
        self._refused: dict[str, str] = {}
        manager = self.structured_output_manager
        self._grammars = Grammars(manager, config, self.max_model_len)

    def add_request(self, request: Request) -> None:
        """Admit a request, and record whether it has a grammar."""
        if request.use_structured_output:
            self._with_grammar.add(request.request_id)
        super().add_request(request)

    def _forget(self, request: Request) -> None:
        self._with_grammar.discard(request.request_id)
        self._prefilled.discard(request.request_id)
        self._grammars.forget(request.request_id)
        super()._forget(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Let a request wait for its compilation and the search of its first closing."""
        req_id = request.request_id
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._grammars.prepare(request)
            grammar = _grammar_of(request)
            if isinstance(grammar, Exception):
                self._refuse(req_id, grammar)
        ready = super()._handle_blocked_waiting_request(request)
        if req_id in self._refused:
            # vLLM 0.33 would give its own reason.
            end_with_error(self, req_id)
        return ready

    def _refuse(self, req_id: str, error: Exception) -> None:
        """Record why a request ends, which vLLM does not report."""
        # Remove the time and source file of a compiler's message.
        why = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip())
        why = why.rstrip(".")
        if not why.startswith("structured_outputs "):
            why = f"structured_outputs cannot be honoured: {why}"
        self._refused[req_id] = why = f"{why}."
        logger.error("Request %s ends with an error: %s", shown(req_id), why)

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        super()._update_after_schedule(output)
        # vLLM would copy drafts to the host for its own check, which is not used.
        output.has_structured_output_requests = False
        if not self._with_grammar:
            output.pending_structured_output_tokens = False
            return
        if not self.running:
            # A caller that asks again at once would keep the lock from the compiler.
            time.sleep(IDLE_SECONDS)
        ids = self._with_grammar & output.num_scheduled_tokens.keys()
        if output.pending_structured_output_tokens:
            # An automaton reads canvases on the device: nothing waits for it.
            grammars = [_grammar_of(self.requests[req_id]) for req_id in ids]
            checked = any(isinstance(each, CanvasGrammar) for each in grammars)
            output.pending_structured_output_tokens = checked
        if self._predicts_first:
            # It is checked by the step after that of the prompt.
            if ids & self._prefilled:
                output.pending_structured_output_tokens = True
            self._prefilled |= ids - output.scheduled_spec_decode_tokens.keys()

    def get_grammar_bitmask(self, output: SchedulerOutput) -> GrammarOutput | None:
        """Return checks of the canvases of a step, or None if none of them has a grammar."""
        if not self._with_grammar:
            return None
        checks: dict[str, tuple[CanvasGrammar, GrammarCheck | RowCheck]] = {}
        for req_id in self._with_grammar & output.num_scheduled_tokens.keys():
            request = self.requests[req_id]
            grammar = _grammar_of(request)
            if not isinstance(grammar, CanvasGrammar) or request.is_prefill_chunk:
                continue
            in_step = req_id in output.scheduled_spec_decode_tokens
            if grammar.state.ended or (grammar.is_kept and not in_step):
                continue
            canvas = grammar.canvas
            if self._predicts_first and not in_step:
                canvas = []
            try:
                checks[req_id] = grammar, grammar.state.check(canvas)
                # A canvas that survives preemption goes on unchanged.
                grammar.is_kept = not self._restarts
            except DeadEnd as error:
                self._refuse(req_id, error)
                end_with_error(self, req_id)
        starts = self._starts(output)
        if not (checks or starts):
            return None
        payload: GrammarPayload | RowsPayload | None = None
        if checks:
            grammars, found = zip(*checks.values(), strict=True)
            states = [grammar.state for grammar in grammars]
            if self._verifies:
                payload = pack_rows(list(checks), found)
            else:
                writes = [state.writes for state in states]
                words = states[0].vocabulary.words
                payload = pack_checks(list(checks), found, writes, words)
        # Without ids of its own vLLM applies no bitmask.
        return CanvasChecks([], NO_BITS, [], payload, starts)

    def grammar_mode(self, req_id: str) -> str | None:
        """Return the grammar mode of a running request; None without a grammar."""
        grammar = _grammar_of(self.requests[req_id])
        return grammar.mode if isinstance(grammar, OwnGrammar) else None

    def _starts(self, output: SchedulerOutput) -> list[AutomatonStart]:
        """Return the automata of requests that start or come back in this step."""
        starts = []
        for data in output.scheduled_new_reqs:
            grammar = _grammar_of(self.requests.get(data.req_id))
            if isinstance(grammar, AutomatonGrammar):
                starts.append(grammar.start(str(data.req_id)))
        return starts

    def update_from_output(
        self, output: SchedulerOutput, results: ModelRunnerOutput
    ) -> Outputs:
        """Update as vLLM does, and keep the canvases of requests with a grammar."""
        self._prefilled -= output.num_scheduled_tokens.keys()
        canvases = results.canvases if isinstance(results, CanvasOutput) else {}
        before = {}
        for req_id in canvases.keys() & self.requests.keys():
            before[req_id] = self.requests[req_id].num_tokens
        outputs = super().update_from_output(output, results)
        for req_id, num_tokens in before.items():
            place = results.req_id_to_index[req_id]
            emitted = len(results.sampled_token_ids[place])
            in_step = req_id in output.scheduled_spec_decode_tokens
            kept = in_step or self._predicts_first
            canvas = canvases[req_id] if kept else []
            self._keep_canvas(req_id, num_tokens, emitted, canvas)
        if not self._refused:
            return outputs
        for of_client in outputs.values():
            for each in of_client.outputs:
                why = self._refused.get(each.request_id)
                if why is not None and each.finish_reason is not None:
                    each.stop_reason = why
        self._refused.clear()
        return outputs

    def _keep_canvas(
        self, req_id: str, num_tokens: int, emitted: int, canvas: list[int]
    ) -> None:
        """Store the rest of a canvas with its grammar, -1 for undecided positions.

        Args:
            num_tokens: tokens of the request before this step.
            emitted: canvas tokens that this step has emitted.
        """
        request = self.requests.get(req_id)
        grammar = _grammar_of(request)
        if request is None or not isinstance(grammar, CanvasGrammar):
            return
        grammar.canvas = []
        # Results in flight at a preemption may have been dropped.
        if request.num_tokens != num_tokens + emitted:
            return
        config = self.decode_config
        tail = 0
        if config.family.absolute_grid:
            # The first block begins inside the prompt.
            tail = num_tokens % self.records[req_id].length
        for token in canvas[emitted : len(canvas) - tail]:
            is_mask = token == config.mask_token_id
            grammar.canvas.append(-1 if is_mask else token)


def _grammar_of(request: Request | None) -> Any:
    """Return a request's grammar once it is compiled, or the error; None before, or without."""
    ours = None if request is None else request.structured_output_request
    return None if ours is None else ours.grammar
