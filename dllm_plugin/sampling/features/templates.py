"""Decode around the tokens that a template gives: ``dllm_template``, full attention.

The canvas states keep the tables, which also place the next forward:
:mod:`dllm_plugin.state.request_table`. With ``dllm_targets`` the gaps of a template take the tokens
that the request names. Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.decoding.full_attention import commit_given, without_given
from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import Step
from dllm_plugin.state.request_table import SlotTable

from .feature import StepFeature

NO_TARGET = -1


class TemplateSteps(StepFeature):
    """Leave given tokens out of a policy's count, and commit them with the block before them."""

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Return whether the request has a template."""
        return arguments_of(self.states.config, params).template is not None

    def start_step(self, step: Step) -> None:
        """Find given positions, and subtract them from the blocks that policies see."""
        step.given_RC = self.states.given(step.slots_R)
        counted = without_given(step.plan, step.canvas, step.given_RC)
        step.plan, step.policy_canvas = counted

    def commit(self, step: Step) -> None:
        """Commit blocks that are given as a whole."""
        decided = step.canvas, step.outcome, step.tokens_RC
        step.outcome = commit_given(*decided, step.remaining_R, self.mask_id)


class Targets(StepFeature):
    """Unmask the tokens that a request names, and no others.

    targets  int64 ``[N, C]``, NO_TARGET at positions without a target; made for the first request
    """

    targets: SlotTable | None = None

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage the targets of a request."""
        asked = arguments_of(self.states.config, params)
        if asked.targets is None or asked.template is None:
            return False
        if self.targets is None:
            shape = self.states.canvas_NC.shape
            self.targets = self.staged_table(shape, torch.int64, NO_TARGET)
        places = np.flatnonzero(np.array(asked.template.token_ids) == FILL)
        self.targets.write((slot, places), asked.targets)
        return True

    def remove_request(self, slot: int) -> None:
        """Free the slot's targets."""
        assert self.targets is not None
        self.targets.write(slot, NO_TARGET)

    def score(self, raw_TV: Tensor, stats: RowStats, chunk: RowChunk) -> None:
        """Replace proposals by the targets, which are then scored.

        The one forward of such a request has its whole template on the canvas.
        """
        assert self.targets is not None
        place_T = chunk.offset_T.to(torch.int64)
        target_T = self.targets.gpu[chunk.slot_T, place_T]
        has_T = target_T != NO_TARGET
        stats.token_T.copy_(target_T.where(has_T, stats.token_T))
        stats.confidence_T.masked_fill_(has_T, 1.0)

    def restrict(self, step: Step) -> None:
        """Unmask every position with a target."""
        assert self.targets is not None
        has_RC = self.targets.gpu[step.slots_R] != NO_TARGET
        step.unmask_RC = step.unmask_RC | (step.plan.candidates_RC & has_RC)
