"""Decide the first token of a block from the last row of what is stored before it.

Fast-dLLM v2 (``generate``): a finished block commits in a forward of its own. Its last row predicts
the first position of the next block, which is decided before that block is computed; so does the
last row of a prompt that ends with a block. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.plan import Canvas, StepOutcome
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.features.grammars import StagedChecks
from dllm_plugin.sampling.features.logprobs import LogprobStash
from dllm_plugin.sampling.features.token_rules import TokenRules
from dllm_plugin.sampling.rows import RowChunk, StepRows
from dllm_plugin.state.canvas_states import CanvasStates, count_canvases

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

NO_ROW = -1


class FirstTokens(NamedTuple):
    """Hold a proposal for the first position of some canvases: token_R int64, take_R bool.

    broken_R int32, 1 where it is taken from logits that are NaN or infinite
    """

    slots_R: Tensor
    token_R: Tensor
    take_R: Tensor
    broken_R: Tensor


class FirstTokenDecoder:
    """Decide first positions, and write them to the canvases; keep no state.

    `propose` is that of the Proposer.
    """

    def __init__(
        self,
        states: CanvasStates,
        rules: TokenRules,
        logprobs: LogprobStash,
        propose: Callable[[list[RowChunk], np.ndarray, int], RowStats],
        checks: StagedChecks,
    ) -> None:
        self.states = states
        self.rules = rules
        self.logprobs = logprobs
        self.propose = propose
        self.checks = checks

    def propose_after_commit(
        self, step: StepRows, logits_TV: Tensor, outcome: StepOutcome, tokens_RC: Tensor
    ) -> FirstTokens:
        """Propose a token after each block that a step stored, before the canvases move on."""
        assert step.last_row_R is not None
        place_R = step.plan.num_committed_R.to(torch.int64)
        hole_R1 = tokens_RC.new_full(
            (len(tokens_RC), 1), self.states.config.mask_token_id
        )
        canvas = step.canvas._replace(tokens_RC=torch.cat([tokens_RC, hole_R1], dim=1))
        rows_R = torch.arange(len(tokens_RC), device=tokens_RC.device)
        source_RC = torch.full_like(canvas.tokens_RC, NO_ROW)
        source_RC.scatter_(1, place_R[:, None], rows_R[:, None])
        allowed_RW = self.checks.allowed_first(step.slots_np, place_R)
        which = (step.last_row_R, step.slots_R, place_R.to(torch.int32), 0)
        chunk = RowChunk(
            rows_R, logits_TV, *which, allowed_RW, np.arange(len(tokens_RC))
        )
        stats = self._propose(chunk, canvas, step.slots_np, source_RC)
        take_R = (step.plan.num_stored_R > 0) & ~outcome.ended_R
        return FirstTokens(step.slots_R, stats.token_T, take_R, stats.broken_T * take_R)

    def decide_after_prefill(
        self, logits_TV: Tensor, batch: "InputBatch"
    ) -> Tensor | None:
        """Decide the first position of requests whose prefill ends at a block's border.

        Returns int32 for each prefill of the batch, 1 where its logits are NaN or infinite.
        """
        first, last = count_canvases(batch), batch.num_reqs
        if logits_TV.shape[0] - batch.num_draft_tokens != last - first or first == last:
            return None  # nothing was prefilled, or these are warm-up rows nobody asked for
        slots_R, slots_np = (
            batch.idx_mapping[first:last],
            batch.idx_mapping_np[first:last],
        )
        states = self.states
        canvas, _ = states.view(slots_R, torch.zeros_like(states.start_N[slots_R]))
        rows_R = torch.arange(last - first, device=states.device)
        source_RC = torch.full_like(canvas.tokens_RC, NO_ROW)
        source_RC[:, 0] = rows_R
        start_R, last_TV = states.start_N[slots_R], logits_TV[batch.num_draft_tokens :]
        nowhere_R = torch.zeros_like(rows_R)
        allowed_RW = self.checks.allowed_first(slots_np, nowhere_R)
        which = (None, slots_R, nowhere_R.to(torch.int32), 0)
        chunk = RowChunk(rows_R, last_TV, *which, allowed_RW, np.arange(last - first))
        stats = self._propose(chunk, canvas, slots_np, source_RC)
        is_open_R = canvas.tokens_RC[:, 0] == states.config.mask_token_id
        is_whole_R = (batch.seq_lens[first:last] == start_R) & (
            states.tail_N[slots_R] == 0
        )
        take_R = is_open_R & is_whole_R
        tokens = FirstTokens(slots_R, stats.token_T, take_R, stats.broken_T * take_R)
        self.write(tokens)
        return tokens.broken_R

    def _propose(
        self, chunk: RowChunk, canvas: Canvas, slots_np: np.ndarray, source_RC: Tensor
    ) -> RowStats:
        """Propose a token from each row, under the rules of its request."""
        self.rules.start_step(canvas, chunk.slot_T, slots_np, source_RC)
        self.logprobs.start_step(slots_np)
        return self.propose([chunk], slots_np, len(chunk.rows_T))

    def write(self, first: FirstTokens) -> None:
        """Put the tokens that are to be taken on the first position of their canvases."""
        canvas_NC, slots_R = self.states.canvas_NC, first.slots_R
        canvas_NC[slots_R, 0] = torch.where(
            first.take_R, first.token_R, canvas_NC[slots_R, 0]
        )
        self.logprobs.write_first(slots_R, first.take_R)
