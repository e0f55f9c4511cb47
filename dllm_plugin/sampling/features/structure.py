"""Delete and insert tokens of the block that is decoded (LLaDA2.2).

Active in every step of a family whose blocks do that. Shape letters as in
:mod:`dllm_plugin.decoding.structure`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.decoding.structure import (
    ROUNDS,
    Limits,
    Rounds,
    Tokens,
    plan_round,
    round_threshold,
    take_round,
)
from dllm_plugin.kernels.best_token import best_token, best_token_reference
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.features.feature import StepFeature
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import DenoisingStep
from dllm_plugin.state.canvas_states import CanvasStates

HASH_SEED = 22  # the factors of hashes: the same in every process


class StructureEdits(StepFeature):
    """Take a round of every current block, and store the rounds by slot.

    The tables are those of :class:`dllm_plugin.decoding.structure.Rounds`, and move with
    the canvas.
    """

    def __init__(
        self,
        states: CanvasStates,
        temperature: Any,
        greedy: Callable[[RowChunk], RowStats],
    ) -> None:
        """Make the tables.

        Args:
            temperature: vLLM's table of temperatures by slot.
            greedy: the method of the Proposer.
        """
        super().__init__(states)
        self.temperature, self.greedy = temperature, greedy
        length, zeros = states.config.block_length, states.zeros
        self.tables = Rounds(
            zeros(torch.int64),
            zeros(torch.int64),
            zeros(torch.bool),
            zeros(torch.bool, length),
            zeros(torch.int64, ROUNDS),
        )
        states.companions += self.tables
        generator = torch.Generator().manual_seed(HASH_SEED)
        factor_B = torch.randint(-(2**62), 2**62, (length,), generator=generator)
        self.factor_B = (2 * factor_B + 1).to(self.device)
        self._rounds: Rounds | None = None

    def active(self, slots_np: np.ndarray) -> bool:
        """Return True: every block of such a family is decoded in rounds."""
        return True

    def _of(self, slots_R: Tensor) -> Rounds:
        return Rounds(*[table[slots_R] for table in self.tables])

    def start_step(self, step: DenoisingStep) -> None:
        """Plan the round."""
        rounds = self._of(step.slots_R)
        step.plan = plan_round(step.canvas, step.plan, rounds, self.mask_id)

    def restrict(self, step: DenoisingStep) -> None:
        """Take the round: what is unmasked is what it changes."""
        requests, slots_R = self.states.requests, step.slots_R
        if self.temperature.np[step.slots_np].any():
            self._edit_greedily(step)
        steps_R = requests.steps.gpu[slots_R].to(torch.int64)
        post_R = requests.number("max_post_steps", slots_R).to(torch.int64)
        step.plan, step.proposal, step.unmask_RC, self._rounds = take_round(
            step.canvas,
            step.plan,
            step.proposal,
            step.unmask_RC,
            self._of(slots_R),
            Limits(steps_R, post_R),
            self._tokens(step),
        )

    def _edit_greedily(self, step: DenoisingStep) -> None:
        """Decide edits by the best tokens, whatever samples the masks."""
        [chunk] = step.chunks
        stats = self.greedy(chunk)
        rows_T = chunk.rows_T
        token_T = torch.zeros(step.num_rows, dtype=torch.int64, device=rows_T.device)
        sure_T = torch.zeros(step.num_rows, device=rows_T.device)
        token_T[rows_T], sure_T[rows_T] = stats.token_T, stats.confidence_T
        edits_RC, source_RC = step.plan.editable_RC, step.source_RC
        token_RC, sure_RC = token_T[source_RC], sure_T[source_RC]
        drawn = step.proposal
        step.proposal = drawn._replace(
            token_RC=token_RC.where(edits_RC, drawn.token_RC),
            confidence_RC=sure_RC.where(edits_RC, drawn.confidence_RC),
        )
        settings = self.states.requests.policy_settings(step.slots_R)
        decided = (step.plan, step.canvas, step.proposal, settings)
        step.unmask_RC = round_threshold(*decided)

    def commit(self, step: DenoisingStep) -> None:
        """Store the rounds, before the canvases move on."""
        assert self._rounds is not None
        for table, rows in zip(self.tables, self._rounds, strict=True):
            table[step.slots_R] = rows
        self._rounds = None

    def _tokens(self, step: DenoisingStep) -> Tokens:
        """Return the ids of the round's tokens, and what finds the next best ones."""
        on_cpu = self.states.device.type == "cpu"
        config, logits_TV = self.states.config, step.chunks[0].logits_XV
        find = best_token_reference if on_cpu else best_token

        def best_but(
            index_RN: Tensor, given: tuple[Tensor, Tensor], wanted_RN: Tensor
        ) -> Tensor:
            mask_RN = torch.full_like(index_RN, config.mask_token_id)
            banned_RN3 = torch.stack((mask_RN, *given), dim=-1)
            row_RN = step.source_RC.gather(1, index_RN)
            found_N = find(
                logits_TV, row_RN.flatten(), wanted_RN.flatten(), banned_RN3.view(-1, 3)
            )
            return found_N.view_as(index_RN)

        delete, split = config.structure_token_ids
        return Tokens(
            config.mask_token_id,
            delete,
            split,
            best_but,
            self.factor_B,
            on_cpu,
        )
