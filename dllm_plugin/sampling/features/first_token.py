"""Decide the first token of a block from the last row of what is stored before it.

Fast-dLLM v2 (``generate``): a finished block commits in a forward of its own. Its last row predicts
the first position of the next block, which is decided before that block is computed; so does the
last row of a prompt that ends with a block. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.decoding.plan import Canvas
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.proposer import Proposer
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import Emitted, Step
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

from .feature import ReadRows, StepFeature
from .grammars import StagedChecks
from .logprobs import LogprobStash

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

NO_ROW = -1


class FirstTokenDecoder(StepFeature):
    """Decide first positions in every step, and write them to the canvases."""

    def __init__(
        self,
        states: CanvasStates,
        checks: StagedChecks,
        readers: Sequence[StepFeature],
        logprobs: LogprobStash,
        proposer: Proposer,
    ) -> None:
        """Decide by the proposals of the step's proposer.

        Args:
            readers: the features that change or score copies of rows.
        """
        super().__init__(states)
        self.checks = checks
        self.logprobs = logprobs
        self.readers = readers
        self.proposer = proposer
        self._proposed: tuple[Tensor, Tensor, Tensor] | None = None

    def active(self, slots_np: np.ndarray) -> bool:
        """Return True: all requests of such a strategy have first tokens."""
        return True

    def commit(self, step: Step) -> None:
        """Propose a token after each block that a step stored, before the canvases move on."""
        if step.last_row_R is None:
            return  # a causal commit has proposed it with its other rows
        tokens_RC, plan = step.tokens_RC, step.plan
        place_R = plan.num_committed_R.to(torch.int64)
        hole_R1 = tokens_RC.new_full((len(tokens_RC), 1), self.mask_id)
        tokens_RC = torch.cat([tokens_RC, hole_R1], dim=1)
        canvas = step.canvas._replace(tokens_RC=tokens_RC)
        rows = self._rows(canvas, step.slots_R, step.slots_np, place_R)
        logits_TV = step.chunks[0].logits_XV
        stats = self._propose(rows, place_R, logits_TV, step.last_row_R)
        take_R = (plan.num_stored_R > 0) & ~step.outcome.ended_R
        self._proposed = step.slots_R, stats.token_T, take_R
        step.broken_R = step.broken_R + stats.broken_T * take_R

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: Emitted
    ) -> Emitted:
        """Write the proposed tokens, and decide those after prefills."""
        if self._proposed is not None:
            self._write(*self._proposed)
            self._proposed = None
        prefills = slice(count_canvases(batch), batch.num_reqs)
        slots_R = batch.idx_mapping[prefills]
        logits_RV = logits_TV[batch.num_draft_tokens :]
        if len(logits_RV) != len(slots_R) or not len(slots_R):
            # Nothing was prefilled, or these are rows of a warm-up.
            return emitted
        broken_R = self._decide_after_prefill(logits_RV, batch, prefills)
        emitted.broken_R[prefills].add_(broken_R)
        if self.method.accept is not None and self.checks.payload is not None:
            # The scheduler reads the canvases that its next checks are for.
            emitted.tokens_RC[prefills] = self.states.canvas_NC[slots_R]
        return emitted

    def _decide_after_prefill(
        self, logits_RV: Tensor, batch: "InputBatch", prefills: slice
    ) -> Tensor:
        """Decide the first position of requests whose prefill ends at a block's border.

        Returns 1 for a prefill whose logits are NaN or infinite, else 0, int32 ``[R]``.
        """
        slots_R = batch.idx_mapping[prefills]
        states = self.states
        start_R = states.start_N[slots_R]
        nowhere_R = torch.zeros_like(start_R)
        canvas, _ = states.view(slots_R, nowhere_R)
        slots_np = batch.idx_mapping_np[prefills]
        rows = self._rows(canvas, slots_R, slots_np, nowhere_R)
        stats = self._propose(rows, nowhere_R, logits_RV, None)
        is_open_R = canvas.tokens_RC[:, 0] == self.mask_id
        ends_R = batch.seq_lens[prefills] == start_R
        take_R = is_open_R & ends_R & (states.tail_N[slots_R] == 0)
        self._write(slots_R, stats.token_T, take_R)
        return stats.broken_T * take_R

    def _rows(
        self, canvas: Canvas, slots_R: Tensor, slots_np: np.ndarray, place_R: Tensor
    ) -> ReadRows:
        """Return canvases of which a row predicts one place each."""
        row_R1 = self.states.number_X[: len(place_R), None]
        source_RC = torch.full_like(canvas.tokens_RC, NO_ROW)
        source_RC.scatter_(1, place_R[:, None], row_R1)
        return ReadRows(canvas, slots_R, slots_np, source_RC)

    def _propose(
        self,
        rows: ReadRows,
        place_R: Tensor,
        logits_XV: Tensor,
        source_R: Tensor | None,
    ) -> RowStats:
        """Propose a token for a place of each canvas, under the rules of its request.

        Args:
            source_R: rows of `logits_XV`; None if they are the rows in order.
        """
        slots_np = rows.slots_np
        count = len(place_R)
        chunk = RowChunk(
            self.states.number_X[:count],
            logits_XV,
            rows.slots_R,
            place_R.to(torch.int32),
            source_R,
            allowed_TW=self.checks.allowed_first(slots_np, place_R),
            owner_np=np.arange(count),
        )
        active = [f for f in self.readers if f.active(slots_np)]
        for feature in active:
            feature.start_rows(rows)
        return self.proposer.propose([chunk], slots_np, count, active)

    def _write(self, slots_R: Tensor, token_R: Tensor, take_R: Tensor) -> None:
        """Write tokens to the first position of the canvases of `take_R`."""
        canvas_NC = self.states.canvas_NC
        before_R = canvas_NC[slots_R, 0]
        canvas_NC[slots_R, 0] = torch.where(take_R, token_R, before_R)
        self.logprobs.write_first(slots_R, take_R)


class FirstTokenAfterPrompt(FirstTokenDecoder):
    """Decide the first position of a text; steps decide the first positions after it."""

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Return True: every text has a first token."""
        return True

    def active(self, slots_np: np.ndarray) -> bool:
        """Return whether a request in these slots has no canvas yet."""
        return StepFeature.active(self, slots_np)

    def commit(self, step: Step) -> None:
        """Leave the requests of a step: they have a canvas."""
        self.users_np[step.slots_np] = False
        self.in_use = bool(self.users_np.any())
