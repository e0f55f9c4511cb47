"""Ban bad words of several tokens, where tokens are decided in any order.

A text must not contain the sequence of tokens. Whichever of them would be decided last is banned:
before a step, each masked position loses the ids that would complete a sequence with the decided
tokens around it. Several positions of one step can still complete a sequence together; then the
last of them is not unmasked in this step. Shape letters as in :mod:`dllm_plugin.decoding.plan`; W
words of a slot, L tokens of the longest, A alignments.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import Canvas, Proposal
from dllm_plugin.kernels.confidence.reference import NEGATIVE_INFINITY
from dllm_plugin.state.canvas_states import CanvasStates

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState

UNUSED = -1  # no token has this id
OUTSIDE = -2  # before the text, or after the canvas


class StepWords(NamedTuple):
    """Hold the words of the requests of a step that have any; R counts these requests.

    which_R int64, place among the step's requests; words_RWL int64; before_RL int64, tokens left
    of the canvas
    """

    which_R: Tensor
    words_RWL: Tensor
    before_RL: Tensor


class BannedIds(NamedTuple):
    """Hold pairs of a logits row and an id that would complete a sequence there, both int64."""

    row: Tensor
    token: Tensor


class BadWords:
    """Keep the words of each slot, and ban what would complete one of them.

    words_NWL int64, UNUSED after a word's end; made when a request first has words
    """

    def __init__(self, states: CanvasStates, req_states: "RequestState") -> None:
        self.states = states
        self.req_states = req_states
        self.words_np: np.ndarray | None = None
        self.words_NWL: Tensor | None = None
        self.has_words_np = np.zeros(states.canvas_NC.shape[0], dtype=bool)
        self._dirty = False
        self._step: StepWords | None = None
        self._banned: BannedIds | None = None

    def add_request(self, slot: int, words: list[list[int]]) -> None:
        """Stage a request's sequences of at least two token ids."""
        self.has_words_np[slot] = bool(words)
        if self.words_np is None and not words:
            return
        count, length = len(words), max(map(len, words), default=0)
        old = self.words_np
        shape = (count, length) if old is None else np.maximum(old.shape[1:], (count, length))
        if old is None or tuple(shape) != old.shape[1:]:
            self.words_np = np.full((len(self.has_words_np), *shape), UNUSED, dtype=np.int64)
            if old is not None:
                self.words_np[:, : old.shape[1], : old.shape[2]] = old
        assert self.words_np is not None
        self.words_np[slot] = UNUSED
        for i, word in enumerate(words):
            self.words_np[slot, i, : len(word)] = word
        self._dirty = True

    def apply_staged_writes(self) -> None:
        """Copy staged sequences to the device."""
        if self._dirty:
            assert self.words_np is not None
            self.words_NWL = async_tensor_h2d(self.words_np, device=self.states.device)
            self._dirty = False

    @property
    def active(self) -> bool:
        """Tell whether a request of this step has bad words."""
        return self._step is not None

    def start_step(
        self, canvas: Canvas, slots_R: Tensor, slots_np: np.ndarray, source_RC: Tensor
    ) -> None:
        """Find which ids would complete a sequence in this step, and in which rows."""
        self._step = self._banned = None
        if self.words_NWL is None or not self.has_words_np[slots_np].any():
            return
        self._step = self._words_of(slots_R, slots_np)
        which_R = self._step.which_R
        self._banned = self._completing_ids(canvas.tokens_RC[which_R], source_RC[which_R])

    def _words_of(self, slots_R: Tensor, slots_np: np.ndarray) -> StepWords:
        """Gather words: only of requests that have some, and no more columns than they fill."""
        assert self.words_np is not None and self.words_NWL is not None
        chosen_np = np.flatnonzero(self.has_words_np[slots_np])
        used_np = self.words_np[slots_np[chosen_np]] != UNUSED
        count = int(used_np.any(axis=2).sum(axis=1).max())
        length = int(used_np.sum(axis=2).max())
        which_R = async_tensor_h2d(chosen_np, device=self.states.device)
        slots_R = slots_R[which_R]
        words_RWL = self.words_NWL[slots_R, :count, :length]
        return StepWords(which_R, words_RWL, self._tokens_before(slots_R, length - 1))

    def _tokens_before(self, slots_R: Tensor, count: int) -> Tensor:
        """Return the `count` tokens left of each canvas, int64 ``[R, count]``."""
        index_RL = self.states.start_N[slots_R][:, None] - count
        index_RL = index_RL + torch.arange(count, device=index_RL.device)
        tokens = self.req_states.all_token_ids.gpu[slots_R[:, None], index_RL.clamp_min(0)]
        return tokens.to(torch.int64).where(index_RL >= 0, OUTSIDE)

    def _completing_ids(self, tokens_RC: Tensor, source_RC: Tensor) -> BannedIds:
        """Return the ids that fill the only hole in a sequence, with the row that predicts it."""
        assert self._step is not None
        words_RWL, mask_id = self._step.words_RWL, self.states.config.mask_token_id
        length = words_RWL.shape[2]
        window_RA1L, equal, used = self._align(tokens_RC)
        hole = used & (window_RA1L == mask_id)
        single = (hole.sum(-1) == 1) & ((equal | hole) == used).all(-1)
        hit_RAWL = hole & single[..., None]
        # Alignment a, offset k is canvas position a + k - (L - 1).
        position_AL = torch.arange(hit_RAWL.shape[1], device=source_RC.device)[:, None]
        position_AL = position_AL + torch.arange(length, device=source_RC.device) - (length - 1)
        inside_AL = (position_AL >= 0) & (position_AL < source_RC.shape[1])
        position_AL = position_AL.clamp(0, source_RC.shape[1] - 1)
        row_RAL = source_RC[:, position_AL.flatten()].view(-1, *position_AL.shape)
        hit_RAWL = hit_RAWL & inside_AL[:, None, :]
        token_RAWL = words_RWL[:, None].expand_as(hit_RAWL).where(hit_RAWL, mask_id)
        row_RAWL = row_RAL[:, :, None, :].expand_as(hit_RAWL)
        return BannedIds(row_RAWL.flatten(), token_RAWL.flatten())

    def _align(self, tokens_RC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lay every word along every alignment of the text around the canvas.

        Returns the tokens of each alignment ``[R, A, 1, L]``, where they equal a word's, and where
        the word has tokens, both bool ``[R, A, W, L]``.
        """
        assert self._step is not None
        _, words_RWL, before_RL = self._step
        length = words_RWL.shape[2]
        after_RL = tokens_RC.new_full((len(tokens_RC), length - 1), OUTSIDE)
        text = torch.cat([before_RL, tokens_RC, after_RL], dim=1)
        window_RA1L = text.unfold(1, length, 1)[:, :, None, :]
        words_R1WL = words_RWL[:, None]
        used = (words_R1WL != UNUSED).expand(-1, window_RA1L.shape[1], -1, -1)
        return window_RA1L, (window_RA1L == words_R1WL) & used, used

    def apply(self, logits_TV: Tensor, rows_T: Tensor) -> None:
        """Ban the ids that were found, in the rows `rows_T` of the step."""
        if self._banned is None or not len(rows_T):
            return
        row, token = self._banned
        local = torch.searchsorted(rows_T, row).clamp_max(len(rows_T) - 1)
        here = rows_T[local] == row
        mask_id = self.states.config.mask_token_id
        # Pairs of other rows fall on the mask token, which is banned everywhere.
        flat = local * logits_TV.shape[1] + token.where(here, mask_id)
        logits_TV.view(-1).index_fill_(0, flat, NEGATIVE_INFINITY)

    def withhold(self, canvas: Canvas, proposal: Proposal, unmask_RC: Tensor) -> Tensor:
        """Take back the last new position of every sequence that this step would complete.

        To take back an edit restores the token that was there, which may complete another
        sequence: then all edits of the request are taken back.
        """
        if self._step is None:
            return unmask_RC
        which_R, all_RC = self._step.which_R, unmask_RC
        unmask_RC, tokens_RC = all_RC[which_R], canvas.tokens_RC[which_R]
        token_RC = proposal.token_RC[which_R]
        kept_RC = self._kept(tokens_RC, token_RC, unmask_RC)
        edits_RC = unmask_RC & (tokens_RC != self.states.config.mask_token_id)
        reverts_R1 = (edits_RC & ~kept_RC).any(dim=1, keepdim=True)
        without_RC = self._kept(tokens_RC, token_RC, unmask_RC & ~edits_RC)
        return all_RC.index_copy(0, which_R, torch.where(reverts_R1, without_RC, kept_RC))

    def _kept(self, tokens_RC: Tensor, token_RC: Tensor, unmask_RC: Tensor) -> Tensor:
        """Return the positions to write that complete no sequence, or are not its last new one."""
        tokens_RC = torch.where(unmask_RC, token_RC, tokens_RC)
        _, equal, used = self._align(tokens_RC)
        complete_RAW = (equal == used).all(-1) & used.any(-1)
        length = used.shape[3]
        pad = length - 1
        new = torch.nn.functional.pad(unmask_RC, (pad, pad)).unfold(1, length, 1)
        new_RAWL = new[:, :, None, :] & used & complete_RAW[..., None]
        offset_L = torch.arange(1, length + 1, device=unmask_RC.device)
        last_RAW = (new_RAWL * offset_L).amax(dim=-1)
        take_back_RAL = (last_RAW[..., None] == offset_L).any(dim=2)
        dropped_RC = torch.zeros(
            len(unmask_RC), unmask_RC.shape[1] + 2 * pad, dtype=torch.bool, device=unmask_RC.device
        )
        for offset in range(length):
            dropped_RC[:, offset : offset + take_back_RAL.shape[1]] |= take_back_RAL[:, :, offset]
        return unmask_RC & ~dropped_RC[:, pad : pad + unmask_RC.shape[1]]
