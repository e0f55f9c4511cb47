"""Decode around the tokens that a template gives: ``dllm_template``, full attention.

The canvas states keep the tables, which also place the next forward:
:mod:`dllm_plugin.state.request_table`.
"""

from vllm.sampling_params import SamplingParams

from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.decoding.full_attention import commit_given, without_given
from dllm_plugin.sampling.features.feature import StepFeature
from dllm_plugin.sampling.step import DenoisingStep
from dllm_plugin.state.canvas_states import CanvasStates


class TemplateSteps(StepFeature):
    """Leave given tokens out of a policy's count, and commit them with the block before them."""

    def __init__(self, states: CanvasStates) -> None:
        super().__init__(len(states.open_N))
        self.states = states

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Return whether the request has a template."""
        return arguments_of(self.states.config, params).template is not None

    def start_step(self, step: DenoisingStep) -> None:
        """Find given positions, and subtract them from the blocks that policies see."""
        step.given_RC = self.states.given(step.slots_R)
        step.plan, step.policy_canvas = without_given(
            step.plan, step.canvas, step.given_RC
        )

    def commit(self, step: DenoisingStep) -> None:
        """Commit blocks that are given as a whole."""
        mask_id = self.states.config.mask_token_id
        step.outcome = commit_given(
            step.canvas, step.outcome, step.tokens_RC, step.remaining_R, mask_id
        )
