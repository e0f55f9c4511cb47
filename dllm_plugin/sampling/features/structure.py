"""Delete and insert tokens of the block that is decoded (LLaDA2.2).

Active in every step of a family whose blocks do that. A grammar checks texts from left to right,
and what it has checked must not move: under one, blocks are those of LLaDA2.1, whose edits
replace tokens only. Shape letters as in
:mod:`dllm_plugin.decoding.structure`.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import has_grammar
from dllm_plugin.decoding.plan import StepPlan, replaced
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
from dllm_plugin.sampling.proposer import Proposer
from dllm_plugin.sampling.step import Step
from dllm_plugin.state.canvas_states import CanvasStates

from .feature import StepFeature

HASH_SEED = 22  # the factors of hashes: the same in every process


class StructureEdits(StepFeature):
    """Take a round of every current block, and store the rounds by slot.

    The tables are those of :class:`dllm_plugin.decoding.structure.Rounds`, and move with
    the canvas. Users are requests with a grammar, whose tokens do not move.
    """

    def __init__(self, states: CanvasStates, proposer: Proposer) -> None:
        """Make the tables."""
        super().__init__(states)
        self.proposer = proposer
        length = states.config.block_length
        zeros = states.zeros
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
        self.factors_np = (2 * factor_B + 1).numpy()
        self.factor_B = self.staged_table(length, torch.int64)
        self._rounds: Rounds | None = None
        self._stays_R: Tensor | None = None

    def warm_up(self, logits_XV: Tensor, carry_NV: Tensor | None) -> None:
        """Compile the kernel of next best tokens, with biases and without."""
        zero_N = torch.zeros(2, dtype=torch.int64, device=logits_XV.device)
        zero_N3 = torch.zeros((2, 3), dtype=torch.int64, device=logits_XV.device)
        bias_MV = torch.zeros_like(logits_XV[:1], dtype=torch.float32)
        for biases in (None, bias_MV):
            best_token(logits_XV, zero_N, zero_N > 0, zero_N3, biases, zero_N)

    def active(self, slots_np: np.ndarray) -> bool:
        """Return True: every block of such a family is decoded in rounds."""
        return True

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage the factors anew: sleep mode may have taken them while no request was left."""
        self.factor_B.write(..., self.factors_np)
        return has_grammar(params)

    def _of(self, slots_R: Tensor) -> Rounds:
        return Rounds(*[table[slots_R] for table in self.tables])

    def start_step(self, step: Step) -> None:
        """Plan the round."""
        rounds = self._of(step.slots_R)
        plan = plan_round(step.canvas, step.plan, rounds, self.mask_id)
        stays_np = self.users_np[step.slots_np]
        self._stays_R = self.upload(stays_np) if stays_np.any() else None
        pairs = zip(step.plan, plan, strict=True)
        step.plan = StepPlan(*[self._where_stays(*pair) for pair in pairs])

    def _where_stays(self, one: Tensor, other: Tensor) -> Tensor:
        """Choose rows of `one` for requests whose tokens do not move, and of `other`."""
        stays_R = self._stays_R
        if stays_R is None:
            return other
        return torch.where(stays_R.view(-1, *[1] * (one.dim() - 1)), one, other)

    def restrict(self, step: Step) -> None:
        """Take the round: what is unmasked is what it changes."""
        requests = self.states.requests
        slots_R = step.slots_R
        slots_np = step.slots_np
        proposer = self.proposer
        samples = proposer.sampling_states.temperature.np[slots_np].any()
        if samples or proposer.reads_np[slots_np].any():
            self._edit_greedily(step)
        steps_R = requests.steps.gpu[slots_R].to(torch.int64)
        post_R = requests.number("max_post_steps", slots_R).to(torch.int64)
        active_RS = step.plan.active_RS
        token_RC = step.proposal.token_RC
        moves_RS = active_RS
        if self._stays_R is not None:
            moves_RS = active_RS & ~self._stays_R[:, None]
        plan, proposal, unmask_RC, self._rounds = take_round(
            step.canvas,
            replaced(step.plan, active_RS=moves_RS),
            step.proposal,
            step.unmask_RC,
            self._of(slots_R),
            Limits(steps_R, post_R),
            self._tokens(step),
        )
        step.plan = replaced(plan, active_RS=active_RS)
        token_RC = self._where_stays(token_RC, proposal.token_RC)
        step.proposal = proposal._replace(token_RC=token_RC)
        step.unmask_RC = self._where_stays(step.unmask_RC, unmask_RC)

    def _edit_greedily(self, step: Step) -> None:
        """Decide edits by the best tokens, whatever samples and penalises the masks."""
        chunk = step.chunks[0]  # the rows that grammars add come after it
        stats = self.proposer.greedy(chunk, step.slots_np)
        rows_T = chunk.rows_T
        token_T = torch.zeros(step.num_rows, dtype=torch.int64, device=rows_T.device)
        sure_T = torch.zeros(step.num_rows, device=rows_T.device)
        token_T[rows_T] = stats.token_T
        sure_T[rows_T] = stats.confidence_T
        edits_RC = step.plan.editable_RC
        source_RC = step.source_RC
        if self._stays_R is not None:
            edits_RC = edits_RC & ~self._stays_R[:, None]
        token_RC = token_T[source_RC]
        sure_RC = sure_T[source_RC]
        drawn = step.proposal
        step.proposal = drawn._replace(
            token_RC=token_RC.where(edits_RC, drawn.token_RC),
            confidence_RC=sure_RC.where(edits_RC, drawn.confidence_RC),
        )
        settings = self.states.requests.policy_settings(step.slots_R)
        decided = (step.plan, step.canvas, step.proposal, settings)
        step.unmask_RC = self._where_stays(step.unmask_RC, round_threshold(*decided))

    def commit(self, step: Step) -> None:
        """Store the rounds, before the canvases move on."""
        assert self._rounds is not None
        for table, rows in zip(self.tables, self._rounds, strict=True):
            table[step.slots_R] = rows
        self._rounds = None

    def _tokens(self, step: Step) -> Tokens:
        """Return the ids of the round's tokens, and what finds the next best tokens."""
        config = self.states.config
        logits_TV = step.chunks[0].logits_XV
        find = best_token_reference if logits_TV.is_cpu else best_token
        rules = self.proposer.rules
        biases = rules.biases(step.slots_np)
        bias_MV = None if biases is None else biases[0]
        bias_R1 = rules.bias_row.gpu[step.slots_R, None]

        def best_but(
            index_RN: Tensor, given: tuple[Tensor, Tensor], wanted_RN: Tensor
        ) -> Tensor:
            mask_RN = torch.full_like(index_RN, config.mask_token_id)
            banned_RN3 = torch.stack((mask_RN, *given), dim=-1)
            row_RN = step.source_RC.gather(1, index_RN)
            found_N = find(
                logits_TV,
                row_RN.flatten(),
                wanted_RN.flatten(),
                banned_RN3.view(-1, 3),
                bias_MV,
                bias_R1.expand_as(row_RN).flatten(),
            )
            return found_N.view_as(index_RN)

        delete, split = config.structure_token_ids
        mask_id = config.mask_token_id
        factor_B = self.factor_B.gpu
        return Tokens(mask_id, delete, split, best_but, factor_B)
