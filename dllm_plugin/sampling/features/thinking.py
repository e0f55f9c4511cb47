"""End the thinking of a text at its budget (Nemotron-Labs-Diffusion).

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.sampling.step import Emitted, Step
from dllm_plugin.state.canvas_states import CanvasStates

from .feature import StepFeature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

NO_TOKEN = -1


class ThinkingBudget(StepFeature):
    """Write the token that ends thinking where a budget is spent without it.

    token   int64, the token; NO_TOKEN for slots without a budget
    budget  int64, tokens of the answer before it at most
    ended_N bool, the answer has the token
    """

    def __init__(self, states: CanvasStates) -> None:
        super().__init__(states)
        self.token = self.staged_table(self.num_slots, torch.int64, NO_TOKEN)
        self.budget = self.staged_table(self.num_slots, torch.int64)
        self.ended_N = states.zeros(torch.bool)
        states.companions.append(self.ended_N)

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage the budget of a request."""
        asked = arguments_of(self.states.config, params)
        budget = asked.max_thinking_tokens
        token = asked.end_think_token_id
        if budget is None or token is None:
            return False
        self.token.write(slot, token)
        self.budget.write(slot, budget)
        return True

    def remove_request(self, slot: int) -> None:
        """Free the budget of a slot."""
        self.token.write(slot, NO_TOKEN)

    def accept(self, step: Step) -> None:
        """Replace the first token of the next block if the budget is spent there."""
        slots_R, plan = step.slots_R, step.plan
        kept_R = plan.num_committed_R.to(torch.int64)
        token_R1 = self.token.gpu[slots_R][:, None]
        is_end_RC = step.canvas.tokens_RC == token_R1
        is_end_RC &= self.position_C < kept_R[:, None]
        self.ended_N[slots_R] |= is_end_RC.any(dim=1)
        place_R = self._place(slots_R, self.states.start_N[slots_R] + kept_R)
        spent_R = (place_R == 0) & (plan.num_stored_R > 0)
        first_RC = (self.position_C == kept_R[:, None]) & spent_R[:, None]
        token_RC = torch.where(first_RC, token_R1, step.proposal.token_RC)
        step.proposal = step.proposal._replace(token_RC=token_RC)

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: Emitted
    ) -> Emitted:
        """Write the token into the blocks in which budgets are spent."""
        slots_R = batch.idx_mapping[: batch.num_reqs]
        states = self.states
        place_R = self._place(slots_R, states.start_N[slots_R])
        most_R = states.requests.block_length.gpu[slots_R]
        if self.method.verifies:
            # A draft is not written beforehand.
            most_R = torch.ones_like(most_R)
        writes_R = place_R < most_R
        where = slots_R, place_R.clamp_max(self.num_positions - 1)
        before_R = states.canvas_NC[where]
        token_R = self.token.gpu[slots_R]
        states.canvas_NC[where] = token_R.where(writes_R, before_R)
        return emitted

    def _place(self, slots_R: Tensor, start_R: Tensor) -> Tensor:
        """Return how many positions after `start` budgets end; the context if they do not."""
        origin_R = self.states.requests.origin.gpu[slots_R]
        left_R = self.budget.gpu[slots_R] - (start_R - origin_R)
        has_R = self.token.gpu[slots_R] != NO_TOKEN
        has_R &= ~self.ended_N[slots_R]
        return left_R.clamp_min(0).where(has_R, self.states.max_model_len)
