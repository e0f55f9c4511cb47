"""Penalise tokens that a text has already: repetition, presence and frequency penalties.

The formulas are those of vLLM. The text is what is known at the start of a step: the prompt with
the tokens of a template, and every other decided position. It is counted anew in each step, so no
token counts twice: tokens before the canvas are those that vLLM stores, the others are those of
the canvas. If drafts are verified, a row counts the canvas up to the position that it predicts,
as vLLM's speculative decoding does.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots, U requests of a step
that have penalties, X positions that are counted at once.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm._custom_ops import apply_repetition_penalties
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.memory import COUNTED_AT_ONCE
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import Step
from dllm_plugin.state.canvas_states import CanvasStates

from .feature import COPIED, ReadRows, StepFeature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState

PRESENCE, FREQUENCY, REPETITION = range(3)
NEUTRAL = (0.0, 0.0, 1.0)
# Of a repetition penalty: with a more extreme number float32 logits would become infinite.
LEAST, MOST = 1e-30, 1e30


class Penalties(StepFeature):
    """Count the tokens of texts, and penalise them.

    numbers    float32 ``[3, N]``: presence, frequency and repetition penalty of a slot
    prompt_NV  bool, whether the prompt or the template of a slot has a token
    count_NV   int32, how often the rest of its text has it

    The last two are made for the first request with penalties. Rows of other slots may hold old
    counts: their penalties are neutral.
    """

    reads = COPIED

    def __init__(
        self, states: CanvasStates, req_states: "RequestState", vocab_size: int
    ) -> None:
        super().__init__(states)
        self.req_states = req_states
        self.vocab_size = vocab_size
        self.numbers = self.staged_table((3, self.num_slots), torch.float32)
        self.numbers.write(REPETITION, NEUTRAL[REPETITION])
        self.by_row = self.method.verifies
        self.prompt_NV: Tensor | None = None
        self.count_NV: Tensor | None = None
        self._longest = 0

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage the penalties of a request."""
        repetition = min(max(params.repetition_penalty, LEAST), MOST)
        asked = (params.presence_penalty, params.frequency_penalty, repetition)
        if asked == NEUTRAL:
            return False
        self.numbers.write((..., slot), asked)
        if self.count_NV is None:
            self.prompt_NV = self.states.zeros(torch.bool, self.vocab_size)
            self.count_NV = self.states.zeros(torch.int32, self.vocab_size)
        return True

    def remove_request(self, slot: int) -> None:
        """Free the slot's penalties."""
        self.numbers.write((..., slot), NEUTRAL)

    def start_step(self, step: Step) -> None:
        """Count the texts as they are before the step."""
        self._longest = int(step.before_np.max())
        super().start_step(step)

    def start_rows(self, rows: ReadRows) -> None:
        """Count the tokens before these canvases, and those that are decided on them."""
        assert self.prompt_NV is not None and self.count_NV is not None
        states, known = self.states, self.req_states
        places_np = np.flatnonzero(self.users_np[rows.slots_np])
        users_np = rows.slots_np[places_np]
        prompt_len_np = states.requests.prompt_len_np[users_np]
        staged = self.upload(np.stack([places_np, prompt_len_np]))
        places_U, prompt_len_U = staged
        slots_U = rows.slots_R[places_U]
        self.prompt_NV.index_fill_(0, slots_U, False)
        self.count_NV.index_fill_(0, slots_U, 0)
        first_U1 = -prompt_len_U[:, None]
        start_U1 = states.start_N[slots_U][:, None]
        has_given = bool(states.templates.has_np[users_np].any())
        # A resumed request is prefilled with what it had decided.
        prefill_len = int(known.prefill_len.np[users_np].max())
        stored = known.all_token_ids.gpu
        # vLLM's warm-up states canvases beyond the context.
        longest = min(max(self._longest, prefill_len), stored.shape[1])
        at_once = max(1, COUNTED_AT_ONCE // len(users_np))
        for low in range(0, longest, at_once):
            high = min(low + at_once, longest)
            position_X = torch.arange(low, high, device=self.device)
            tokens_UX = stored[slots_U[:, None], position_X].to(torch.int64)
            tokens_UX = tokens_UX.where(position_X < start_U1, self.mask_id)
            self._count(slots_U, tokens_UX, first_U1 + position_X, has_given)
        if self.by_row:
            return
        tokens_UC = rows.canvas.tokens_RC[places_U]
        # First tokens of blocks are proposed from canvases with one more position.
        place_C = torch.arange(tokens_UC.shape[1], device=self.device)
        place_UC = first_U1 + start_U1 + place_C
        self._count(slots_U, tokens_UC, place_UC, has_given)

    def _count(
        self, slots_U: Tensor, tokens_UX: Tensor, place_UX: Tensor, has_given: bool
    ) -> None:
        """Count tokens of texts.

        Args:
            place_UX: their places in the answer; negative in the prompt.
            has_given: one of the requests has a template.
        """
        assert self.prompt_NV is not None and self.count_NV is not None
        most, mask_id = self.vocab_size, self.mask_id
        is_prompt_UX = place_UX < 0
        if has_given:
            is_prompt_UX |= self.states.templates.given(slots_U, place_UX)
        # The mask token, which is banned everywhere, stands for what does not count.
        tokens_UX = tokens_UX.where(tokens_UX < most, mask_id)
        row_U1 = slots_U[:, None] * most
        index_UX = row_U1 + tokens_UX.where(is_prompt_UX, mask_id)
        self.prompt_NV.view(-1).index_fill_(0, index_UX.flatten(), True)
        index_UX = row_U1 + tokens_UX.masked_fill(is_prompt_UX, mask_id)
        one_X = torch.ones_like(index_UX, dtype=torch.int32).flatten()
        self.count_NV.view(-1).scatter_add_(0, index_UX.flatten(), one_X)

    def apply(self, logits_TV: Tensor, chunk: RowChunk, slots_np: np.ndarray) -> None:
        """Penalise float32 copies of rows."""
        before_T = chunk.offset_T + chunk.shift if self.by_row else None
        self.penalise(logits_TV, chunk.slot_T, slots_np, before_T)

    def penalise(
        self,
        logits_TV: Tensor,
        slot_T: Tensor,
        slots_np: np.ndarray,
        before_T: Tensor | None = None,
    ) -> None:
        """Penalise, in place, rows of the requests in these slots.

        Args:
            before_T: canvas positions that count for each row; None if all are counted already.
        """
        assert self.prompt_NV is not None and self.count_NV is not None
        if not len(logits_TV):
            return
        asked = self.numbers.np[:, slots_np]
        presence_T, frequency_T, repetition_T = self.numbers.gpu[:, slot_T]
        count_TV = self.count_NV[slot_T]
        if before_T is not None:
            tokens_TC = self.states.canvas_NC[slot_T]
            counts_TC = tokens_TC != self.mask_id
            counts_TC &= self.position_C < before_T[:, None]
            count_TV.scatter_add_(1, tokens_TC, counts_TC.to(count_TV.dtype))
        has_TV = count_TV > 0
        if (asked[REPETITION] != NEUTRAL[REPETITION]).any():
            prompt_TV = self.prompt_NV[slot_T]
            apply_repetition_penalties(logits_TV, prompt_TV, has_TV, repetition_T)
        if asked[FREQUENCY].any():
            logits_TV -= frequency_T[:, None] * count_TV
        if asked[PRESENCE].any():
            logits_TV -= presence_T[:, None] * has_TV
