"""Apply a request's rules about token ids: stop tokens, min_tokens, biases, allowed ids, bad words.

``docs/strategies.md`` defines them for tokens that are decided in any order. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; N slots, K stop tokens of a slot, M rows of the bias table, X rows
of a logits tensor.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import Canvas, Proposal
from dllm_plugin.kernels.confidence.reference import NEGATIVE_INFINITY
from dllm_plugin.sampling.features.bad_words import UNUSED, BadWords
from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import SlotTable

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState

MAX_STOPS = 136  # what admission lets pass, EOS and the family's end-of-turn tokens
EARLY_ONLY = (
    -2
)  # `EARLY_ONLY - id` in the stop table: banned by min_tokens, ends nothing


class TokenRules:
    """Ban and bias ids per slot and position, and tell which tokens end a request.

    stop       int64 ``[N, K]``, UNUSED or see EARLY_ONLY where it is no stop token
    min_end    int64 ``[N]``, first absolute position where a stop token is allowed
    bias_row   int64 ``[N]``, row of the bias table; row 0 is all zeros
    bias_MV    float32, made when the first request needs it: one row per such request
    """

    def __init__(
        self, states: CanvasStates, req_states: "RequestState", vocab_size: int
    ) -> None:
        self.states = states
        self.vocab_size = vocab_size
        self.num_slots = states.canvas_NC.shape[0]
        self.stop = SlotTable((self.num_slots, MAX_STOPS), torch.int64, states.device)
        self.stop.np.fill(UNUSED)
        self.stop.copy_to_device()
        self._dirty = False
        self.min_end = SlotTable(self.num_slots, torch.int64, states.device)
        self.min_tokens_np = np.zeros(self.num_slots, dtype=np.int64)
        self.bias_row = SlotTable(self.num_slots, torch.int64, states.device)
        self.bias_MV: Tensor | None = None
        self._new_biases: list[tuple[int, Tensor]] = []
        self.bad_words = BadWords(states, req_states)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Stage the rules of a request; its prompt length is already known to the states."""
        self._dirty = True
        stop_ids = self._stop_ids(params)
        self.stop.np[slot] = UNUSED
        self.stop.np[slot, : len(stop_ids)] = stop_ids
        self.min_tokens_np[slot] = params.min_tokens
        self.min_end.np[slot] = (
            self.states.requests.prompt_len_np[slot] + params.min_tokens
        )
        bad_words = params.bad_words_token_ids or []
        single = [words[0] for words in bad_words if len(words) == 1]
        self.bad_words.table.add(slot, [words for words in bad_words if len(words) > 1])
        bias = self._bias(params, single)
        self.bias_row.np[slot] = 0 if bias is None else slot + 1
        if bias is not None:
            self._new_biases.append((slot + 1, bias))

    def remove_request(self, slot: int) -> None:
        """Forget what a slot's request may have had a lot of."""
        self.bad_words.table.remove(slot)

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Return a request's row of the stop table."""
        ends = set(params.stop_token_ids or ())
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
        # `min_tokens` also bans an EOS that `ignore_eos` keeps from ending the request.
        early_only = params.all_stop_token_ids - ends
        # Masked positions hold the mask id, and no position can hold an id that does not exist.
        ends = {i for i in ends if self._exists(i)}
        stop_ids = [*ends, *(EARLY_ONLY - i for i in early_only if self._exists(i))]
        return stop_ids[:MAX_STOPS]

    def _exists(self, token_id: int) -> bool:
        return (
            0 <= token_id < self.vocab_size
            and token_id != self.states.config.mask_token_id
        )

    def _bias(self, params: SamplingParams, banned: list[int]) -> Tensor | None:
        """Return a request's row of the bias table; None if it needs none."""
        if not (params.logit_bias or params.allowed_token_ids or banned):
            return None
        bias_V = torch.zeros(self.vocab_size, dtype=torch.float32)
        if params.allowed_token_ids:
            bias_V.fill_(NEGATIVE_INFINITY)
            bias_V[list(params.allowed_token_ids)] = 0.0
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            bias_V[ids] += torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32
            )
        bias_V[banned] = NEGATIVE_INFINITY
        return bias_V

    def apply_staged_writes(self) -> None:
        """Copy what `add_request` staged to the device."""
        if self._dirty:
            for tensor in (self.stop, self.min_end, self.bias_row):
                tensor.copy_to_device()
            self._dirty = False
        if self._new_biases:
            device = self.states.device
            if self.bias_MV is None:
                self.bias_MV = torch.zeros(
                    self.num_slots + 1, self.vocab_size, device=device
                )
            rows, biases = zip(*self._new_biases, strict=True)
            index = async_tensor_h2d(np.array(rows, dtype=np.int64), device=device)
            # Rows of a whole vocabulary: without pinned memory their copy waits for the stream.
            self.bias_MV[index] = async_tensor_h2d(torch.stack(biases), device=device)
            self._new_biases.clear()
        self.bad_words.table.apply_staged_writes()

    def start_step(
        self, canvas: Canvas, slots_R: Tensor, slots_np: np.ndarray, source_RC: Tensor
    ) -> None:
        """Find the ids that would complete a bad word, before rows are read."""
        self.bad_words.start_step(canvas, slots_R, slots_np, source_RC)

    def apply(
        self,
        logits_TV: Tensor,
        rows_T: Tensor,
        slot_T: Tensor,
        position_T: Tensor,
        slots_np: np.ndarray,
    ) -> None:
        """Ban and bias ids in place; the mask token is never a prediction."""
        mask_id, biases = self.states.config.mask_token_id, self.biases(slots_np)
        if biases is not None:
            logits_TV += biases[0][biases[1][slot_T]]
        logits_TV[:, mask_id] = NEGATIVE_INFINITY
        if self.uses_min_tokens(slots_np):
            self.ban_early_stops(logits_TV, None, slot_T, position_T)
        self.bad_words.apply(logits_TV, rows_T)

    def biases(self, slots_np: np.ndarray) -> tuple[Tensor, Tensor] | None:
        """Return the table of biases and each slot's row of it, if one of the slots has any."""
        if self.bias_MV is None or not self.bias_row.np[slots_np].any():
            return None
        return self.bias_MV, self.bias_row.gpu

    def uses_min_tokens(self, slots_np: np.ndarray) -> bool:
        """Tell whether one of the slots has set `min_tokens`."""
        return bool(self.min_tokens_np[slots_np].any())

    def ban_early_stops(
        self,
        logits_XV: Tensor,
        source_T: Tensor | None,
        slot_T: Tensor,
        position_T: Tensor,
    ) -> None:
        """Ban stop tokens in place where a row predicts one of the first `min_tokens` positions.

        A carry row keeps its bans: it predicts the same position in every step.
        """
        if source_T is None:
            source_T = torch.arange(len(slot_T), device=slot_T.device)
        stop_TK = self.stop.gpu[slot_T]
        early_TK = (position_T < self.min_end.gpu[slot_T])[:, None] & (
            stop_TK != UNUSED
        )
        stop_TK = torch.where(stop_TK <= EARLY_ONLY, EARLY_ONLY - stop_TK, stop_TK)
        # What need not be banned falls on the mask token, which is banned everywhere.
        stop_TK = stop_TK.where(early_TK, self.states.config.mask_token_id)
        banned = logits_XV.new_full((), NEGATIVE_INFINITY)
        logits_XV.index_put_((source_T.to(torch.int64)[:, None], stop_TK), banned)

    def withhold(self, canvas: Canvas, proposal: Proposal, unmask_RC: Tensor) -> Tensor:
        """Take back positions that would complete a bad word together."""
        return self.bad_words.withhold(canvas, proposal, unmask_RC)

    def is_stop(self, tokens_RC: Tensor, slots_R: Tensor) -> Tensor:
        """Return the positions whose token ends the request, bool ``[R, C]``."""
        return (tokens_RC[:, :, None] == self.stop.gpu[slots_R][:, None, :]).any(dim=-1)
