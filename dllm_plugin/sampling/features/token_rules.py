"""Apply a request's rules about token ids: stop tokens, min_tokens, biases, LLaDA's EOS options.

``docs/decoding.md`` defines them for tokens that are decided in any order. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; N slots, K stop tokens of a slot, M rows of the bias table, X rows
of a logits tensor.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

from dllm_plugin.config.decode import has_grammar
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.state.canvas_states import CanvasStates

from .bad_words import UNUSED
from .feature import StepFeature

# What admission lets pass, EOS and the family's end-of-turn tokens.
MAX_STOPS = 136
# `EARLY_ONLY - id` in the stop table: banned by min_tokens, but ends nothing.
EARLY_ONLY = -2
NO_PROPOSAL = "logits_eos_inf"
NO_CONFIDENCE = "confidence_eos_eot_inf"


class TokenRules(StepFeature):
    """Ban and bias ids per slot and position, and find the tokens that end a request.

    Kernels and compiled code read the tables, so a step with rules has no active feature for them.

    stop       int64 ``[N, K]``, UNUSED or see EARLY_ONLY if it is no stop token
    min_end    int64 ``[N]``, first absolute position where a stop token is allowed
    bias_row   int64 ``[N]``, row of the bias table; row 0 is all zeros
    bias_MV    float32, one row per request with a bias; made for the first of them
    """

    def __init__(self, states: CanvasStates, vocab_size: int) -> None:
        super().__init__(states)
        self.vocab_size = vocab_size
        shape = (self.num_slots, MAX_STOPS)
        self.stop = self.staged_table(shape, torch.int64, UNUSED)
        self.stop.copy_to_device()
        self.min_end = self.staged_table(self.num_slots, torch.int64)
        self.bias_row = self.staged_table(self.num_slots, torch.int64)
        self.min_tokens_np = np.zeros(self.num_slots, dtype=np.int64)
        self.bias_MV: Tensor | None = None
        self._new_biases: list[tuple[int, Tensor]] = []

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage the rules of a request; the states already have its prompt length."""
        stop_ids = self._stop_ids(params)
        self.stop.write(slot, UNUSED)
        self.stop.write((slot, slice(len(stop_ids))), stop_ids)
        self.min_tokens_np[slot] = params.min_tokens
        prompt_len = self.states.requests.prompt_len_np[slot]
        self.min_end.write(slot, prompt_len + params.min_tokens)
        bias = self._bias(params)
        self.bias_row.write(slot, 0 if bias is None else slot + 1)
        if bias is not None:
            self._new_biases.append((slot + 1, bias))
        return False

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Return a request's row of the stop table."""
        ends = set(params.stop_token_ids or ())
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
        # `min_tokens` also bans an EOS that `ignore_eos` keeps from ending the request.
        early_only = params.all_stop_token_ids - ends
        # The mask id marks masked positions, and no position can have an id that does not exist.
        early = [EARLY_ONLY - i for i in early_only if self._exists(i)]
        return [*filter(self._exists, ends), *early][:MAX_STOPS]

    def _exists(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size and token_id != self.mask_id

    def _bias(self, params: SamplingParams) -> Tensor | None:
        """Return a request's row of the bias table; None if the request needs none."""
        bad_words = params.bad_words_token_ids or []
        banned = [word[0] for word in bad_words if len(word) == 1]
        if has_grammar(params):
            banned += self.states.config.structure_token_ids
        if not (params.logit_bias or params.allowed_token_ids or banned):
            return None
        bias_V = torch.zeros(self.vocab_size, dtype=torch.float32)
        if params.allowed_token_ids:
            bias_V.fill_(-torch.inf)
            bias_V[list(params.allowed_token_ids)] = 0.0
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            added = list(params.logit_bias.values())
            bias_V[ids] += torch.tensor(added, dtype=torch.float32)
        bias_V[banned] = -torch.inf
        return bias_V

    def apply_staged_writes(self) -> None:
        """Copy the rules of new requests to the device."""
        super().apply_staged_writes()
        if not self._new_biases:
            return
        if self.bias_MV is None:
            shape = (self.num_slots + 1, self.vocab_size)
            self.bias_MV = torch.zeros(shape, device=self.device)
        rows, biases = zip(*self._new_biases, strict=True)
        index = self.upload(np.array(rows, dtype=np.int64))
        # Rows of a whole vocabulary: without pinned memory their copy waits for the stream.
        self.bias_MV[index] = self.upload(torch.stack(biases))
        self._new_biases.clear()

    def apply(self, logits_TV: Tensor, chunk: RowChunk, slots_np: np.ndarray) -> None:
        """Ban and bias ids in float32 copies; the mask token is never a prediction."""
        mask_id = self.mask_id
        biases = self.biases(slots_np)
        if biases is not None:
            logits_TV += biases[0][biases[1][chunk.slot_T]]
        logits_TV[:, mask_id] = -torch.inf
        if self.uses_min_tokens(slots_np):
            self.ban_early_stops(logits_TV, None, chunk)

    def biases(self, slots_np: np.ndarray) -> tuple[Tensor, Tensor] | None:
        """Return the table of biases and each slot's row of it, if one of the slots has any."""
        if self.bias_MV is None or not self.bias_row.np[slots_np].any():
            return None
        return self.bias_MV, self.bias_row.gpu

    def uses_min_tokens(self, slots_np: np.ndarray) -> bool:
        """Return whether one of the slots has set `min_tokens`."""
        return bool(self.min_tokens_np[slots_np].any())

    def ban_early_stops(
        self, logits_XV: Tensor, source_T: Tensor | None, chunk: RowChunk
    ) -> None:
        """Ban stop tokens in place in rows that predict one of the first `min_tokens` positions.

        A carry row keeps its bans: it predicts the same position in every step.

        Args:
            source_T: the row of `logits_XV` of each row of the chunk; None if they are the same.
        """
        slot_T = chunk.slot_T
        if source_T is None:
            source_T = torch.arange(len(slot_T), device=slot_T.device)
        stop_TK = self.stop.gpu[slot_T]
        position_T = self.states.start_N[slot_T] + chunk.offset_T + chunk.shift
        is_early_T1 = (position_T < self.min_end.gpu[slot_T])[:, None]
        early_TK = is_early_T1 & (stop_TK != UNUSED)
        only_early_TK = stop_TK <= EARLY_ONLY
        stop_TK = torch.where(only_early_TK, EARLY_ONLY - stop_TK, stop_TK)
        # An id that is not banned is replaced by the mask token, which is banned everywhere.
        stop_TK = stop_TK.where(early_TK, self.mask_id)
        banned = logits_XV.new_full((), -torch.inf)
        row_T1 = source_T.to(torch.int64)[:, None]
        logits_XV.index_put_((row_T1, stop_TK), banned)

    def is_stop(self, tokens_RC: Tensor, slots_R: Tensor) -> Tensor:
        """Return the positions whose token ends the request, bool ``[R, C]``."""
        stop_R1K = self.stop.gpu[slots_R][:, None, :]
        return (tokens_RC[:, :, None] == stop_R1K).any(dim=-1)


class EosBans:
    """Ban end-of-sequence tokens for two options of LLaDA's ``generate.py``.

    With ``logits_eos_inf`` EOS is never proposed. With ``confidence_eos_eot_inf`` EOS and
    end-of-turn tokens may be proposed, but get no confidence and so are unmasked last.
    """

    def __init__(self, states: CanvasStates, model_config: ModelConfig) -> None:
        self.states = states
        eos = getattr(model_config.hf_config, "eos_token_id", None)
        ids = eos if isinstance(eos, list) else [eos]
        self.eos_ids = [i for i in ids if i is not None]
        self.turn_end_ids = list(states.config.turn_end_token_ids)

    def users(self, slots_np: np.ndarray) -> np.ndarray:
        """Return which of the slots have set one of the options, bool."""
        users = self.states.requests.users
        return users(NO_PROPOSAL, slots_np) | users(NO_CONFIDENCE, slots_np)

    def ban(
        self,
        logits_TV: Tensor,
        slot_T: Tensor,
        slots_np: np.ndarray,
        option: str,
        ids: list[int],
        among_T: Tensor | None = None,
    ) -> None:
        """Ban ids in the rows (of `among_T`, if given) whose requests have set an option."""
        if not self.states.requests.uses(option, slots_np):
            return
        rows_T = self.states.requests.number(option, slot_T) > 0
        if among_T is not None:
            rows_T &= among_T
        for i in ids:
            logits_TV[:, i].masked_fill_(rows_T, -torch.inf)
