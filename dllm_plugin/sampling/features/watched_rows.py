"""Send the canvases of watched requests to the host: tokens and their confidences.

They travel as rows of log-probabilities (:mod:`dllm_plugin.config.carriers`), which vLLM
copies without waiting for the device. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; N slots, W watched requests of a step.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.carriers import NO_TOKEN
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.config.worker_carriers import pack_canvas_rows
from dllm_plugin.sampling.step import Emitted, EmittedLogprobs, Step
from dllm_plugin.state.canvas_states import CanvasStates

from .feature import StepFeature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class WatchedRows(StepFeature):
    """Store, per slot and canvas position, the confidence with which its token was unmasked.

    confidence_NC  float32, 0 if no policy took a token; made for the first watched request
    """

    def __init__(self, states: CanvasStates) -> None:
        super().__init__(states)
        self.confidence_NC: Tensor | None = None
        self._rows: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Return whether a request is watched."""
        if not arguments_of(self.states.config, params).is_watched:
            return False
        if self.confidence_NC is None:
            zeros = self.states.zeros
            self.confidence_NC = zeros(torch.float32, self.num_positions)
            self.states.companions.append(self.confidence_NC)
        return True

    def commit(self, step: Step) -> None:
        """Store the step's confidences, list what is decided, and move on with the canvas."""
        assert self.confidence_NC is not None
        length = self.num_positions
        outcome = step.outcome
        which_np = np.flatnonzero(self.users_np[step.slots_np])
        which_W = self.upload(which_np)
        slots_W = step.slots_R[which_W]
        taken_WC = outcome.unmask_RC[which_W]
        sure_WC = step.proposal.confidence_RC[which_W]
        now_WC = sure_WC.where(taken_WC, self.confidence_NC[slots_W])
        moved_W = outcome.num_committed_R[which_W].to(torch.int64)
        from_WC = self.position_C + moved_W[:, None]
        moved_WC = now_WC.gather(1, from_WC.clamp_max(length - 1))
        moved_WC = moved_WC.masked_fill(from_WC >= length, 0.0)
        self.confidence_NC[slots_W] = moved_WC
        # In the order in which they are emitted: after the part that belongs to the prompt.
        emit_WC = step.emit_RC[which_W]
        ids_WC = step.tokens_RC[which_W].gather(1, emit_WC)
        tail_W1 = step.canvas.tail_R[which_W][:, None]
        no_token_WC = self.position_C + tail_W1 >= length
        no_token_WC |= ids_WC == self.mask_id
        self._rows = (
            ids_WC.masked_fill(no_token_WC, NO_TOKEN),
            now_WC.gather(1, emit_WC),
            taken_WC.gather(1, emit_WC),
            step.index_R[which_W],
        )

    def finish_batch(
        self, logits_TV: Tensor, batch: "InputBatch", emitted: Emitted
    ) -> Emitted:
        """Append the rows of watched requests to the log-probabilities."""
        if self._rows is None:
            return emitted
        rows, self._rows = self._rows, None
        before, columns = emitted.logprobs, None
        offsets = [0] * (batch.num_reqs + 1)
        if before is not None:
            columns = before[:3]
            offsets = before.cu_num_generated_tokens
        logprobs = EmittedLogprobs(*pack_canvas_rows(columns, *rows), offsets)
        return emitted._replace(logprobs=logprobs)
