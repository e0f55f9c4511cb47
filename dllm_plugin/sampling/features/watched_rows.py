"""Bring the canvases of watched requests to the host: tokens and how certain each was.

They travel in vLLM's log-probability tensors, as rows behind all others, which the scheduler takes
off again: vLLM copies them without waiting for the device. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; N slots, W watched requests of a step.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.config.request.reporting import reporting
from dllm_plugin.decoding.plan import StepOutcome
from dllm_plugin.sampling.features.logprobs import EmittedLogprobs
from dllm_plugin.state.canvas_states import CanvasStates

NO_TOKEN = -1


class WatchedRows:
    """Keep, per slot and canvas position, the confidence with which its token was taken.

    confidence_NC  float32, 0 where no policy took a token; made when a request first asks
    watched_np     whether a slot's request asks
    active         whether a request of this step does
    """

    def __init__(self, states: CanvasStates) -> None:
        self.states = states
        self.watched_np = np.zeros(states.canvas_NC.shape[0], dtype=np.bool_)
        self.confidence_NC: Tensor | None = None
        self.active = False
        self._places_np = np.empty(0, dtype=np.int64)
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Note whether a request is watched."""
        self.watched_np[slot] = reporting(params.extra_args).watches
        if self.watched_np[slot] and self.confidence_NC is None:
            shape, device = self.states.canvas_NC.shape, self.states.device
            self.confidence_NC = torch.zeros(shape, dtype=torch.float32, device=device)
            self.states.companions.append(self.confidence_NC)

    def start_step(self, slots_np: np.ndarray) -> None:
        """See which requests of a step are watched."""
        if self.confidence_NC is not None:
            self._places_np = np.flatnonzero(self.watched_np[slots_np])
            self.active = bool(len(self._places_np))

    def commit(
        self,
        slots_R: Tensor,
        outcome: StepOutcome,
        confidence_RC: Tensor,
        tokens_RC: Tensor,
        emit_RC: Tensor,
        tail_R: Tensor,
        index_R: Tensor,
    ) -> None:
        """Keep the step's confidences, note what is decided, and move on with the canvas."""
        if not self.active:
            return
        assert self.confidence_NC is not None
        places_W = async_tensor_h2d(self._places_np, device=slots_R.device)
        slots_W, mask_id = slots_R[places_W], self.states.config.mask_token_id
        taken_WC = outcome.unmask_RC[places_W]
        now_WC = confidence_RC[places_W].where(taken_WC, self.confidence_NC[slots_W])
        num_positions = now_WC.shape[1]
        position_C = torch.arange(num_positions, device=slots_R.device)
        source_WC = (
            position_C + outcome.num_committed_R[places_W].to(torch.int64)[:, None]
        )
        shifted_WC = now_WC.gather(1, source_WC.clamp_max(num_positions - 1))
        self.confidence_NC[slots_W] = shifted_WC.masked_fill(
            source_WC >= num_positions, 0.0
        )
        # In the order in which they are emitted: behind the part that belongs to the prompt.
        from_WC = emit_RC[places_W]
        ids_WC = tokens_RC[places_W].gather(1, from_WC)
        behind_WC = position_C + tail_R[places_W][:, None] >= num_positions
        ids_WC = ids_WC.masked_fill(behind_WC | (ids_WC == mask_id), NO_TOKEN)
        # vLLM's ranks are positive: a negative one says whose row this is, and if it is new.
        place_WC = -1 - (2 * index_R[places_W][:, None] + taken_WC.gather(1, from_WC))
        rows = (ids_WC.to(torch.int32), now_WC.gather(1, from_WC), place_WC)
        self._rows = tuple(row.flatten() for row in rows)  # type: ignore[assignment]

    def behind(
        self, logprobs: EmittedLogprobs | None, num_reqs: int
    ) -> EmittedLogprobs | None:
        """Return a step's log-probabilities with the rows of its watched requests behind them."""
        if self._rows is None:
            return logprobs
        (ids_T, confidence_T, place_T), self._rows = self._rows, None
        if logprobs is None:
            none = [0] * (num_reqs + 1)
            return EmittedLogprobs(ids_T[:, None], confidence_T[:, None], place_T, none)
        columns = (0, logprobs.logprobs.shape[1] - 1)
        return logprobs._replace(
            logprob_token_ids=_stacked(logprobs.logprob_token_ids, ids_T, columns),
            logprobs=_stacked(logprobs.logprobs, confidence_T, columns),
            selected_token_ranks=torch.cat([logprobs.selected_token_ranks, place_T]),
        )


def _stacked(rows: Tensor, first_T: Tensor, columns: tuple[int, int]) -> Tensor:
    """Append rows of which only the first column is given."""
    padded = torch.nn.functional.pad(first_T[:, None].to(rows.dtype), columns)
    return torch.cat([rows, padded])
