"""Ban bad words of several tokens, although tokens are decided in any order.

A text must not contain the sequence of tokens. Whichever of them would be decided last is banned:
before a step, each masked position loses the ids that would complete a sequence with the decided
tokens around it. Several positions of one step can still complete a sequence together; then the
last of them is not unmasked in this step. If drafts are verified, a row is restricted by the
tokens before its position. Shape letters as in :mod:`dllm_plugin.decoding.plan`; W
words of a slot, L tokens of the longest, A alignments.

The host knows which slots have words and how many. A row of the table on the device lists the words
of a slot one after the other, each as long as the slot's longest; X = MAX_WORDS_TOKENS, N slots.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.config.memory import ALIGNED_AT_ONCE
from dllm_plugin.config.request.arguments import MAX_WORDS_TOKENS
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import Step
from dllm_plugin.state.canvas_states import CanvasStates

from .feature import COPIED, ReadRows, StepFeature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState


UNUSED = -1  # no token has this id


class WordTable:
    """Store the words of each slot, and copy only those of new requests.

    tokens_NX    int32, UNUSED after a word's end; made for the first request with words, and freed
                 with the last
    count_np     int64 ``[N]``, words of a slot
    length_np    int64 ``[N]``, tokens of its longest word
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.tokens_NX: Tensor | None = None
        self.count_np = np.zeros(num_slots, dtype=np.int64)
        self.length_np = np.zeros(num_slots, dtype=np.int64)
        self._new: dict[int, np.ndarray] = {}

    def add(self, slot: int, words: list[list[int]]) -> None:
        """Stage a slot's words, possibly none."""
        self.remove(slot)
        if not words:
            return
        length = max(map(len, words))
        row_np = np.full((len(words), length), UNUSED, dtype=np.int32)
        for i, word in enumerate(words):
            row_np[i, : len(word)] = word
        assert row_np.size <= MAX_WORDS_TOKENS, "admission refuses more"
        self.count_np[slot], self.length_np[slot] = row_np.shape
        self._new[slot] = row_np.reshape(-1)

    def remove(self, slot: int) -> None:
        """Free a slot's words."""
        self._new.pop(slot, None)
        self.count_np[slot] = self.length_np[slot] = 0
        if self.tokens_NX is not None and not self.count_np.any():
            self.tokens_NX = None

    def apply_staged_writes(self) -> None:
        """Copy the words of new requests to the device."""
        if not self._new:
            return
        if self.tokens_NX is None:
            shape = (len(self.count_np), MAX_WORDS_TOKENS)
            dtype = torch.int32
            device = self.device
            self.tokens_NX = torch.full(shape, UNUSED, dtype=dtype, device=device)
        shape = (len(self._new), MAX_WORDS_TOKENS)
        rows_np = np.full(shape, UNUSED, dtype=np.int32)
        for i, row_np in enumerate(self._new.values()):
            rows_np[i, : len(row_np)] = row_np
        slots = self._upload(np.array([*self._new], dtype=np.int64))
        self.tokens_NX[slots] = self._upload(rows_np)
        self._new.clear()

    def _upload(self, values: np.ndarray) -> Tensor:
        return async_tensor_h2d(values, device=self.device)

    def words_of(self, slots_R: Tensor, slots_np: np.ndarray) -> Tensor:
        """Return the words of some slots, int32 ``[R, W, L]``, UNUSED after their last word."""
        assert self.tokens_NX is not None
        sizes_np = np.stack([self.count_np[slots_np], self.length_np[slots_np]])
        count_R11, length_R11 = self._upload(sizes_np)[:, :, None, None]
        most_words, longest = sizes_np.max(axis=1).tolist()
        word_W1 = torch.arange(most_words, device=self.device)[:, None]
        place_L = torch.arange(longest, device=self.device)
        index_RWL = word_W1 * length_R11 + place_L
        index_RWL = index_RWL.clamp_max(MAX_WORDS_TOKENS - 1)
        words_RX = self.tokens_NX[slots_R].gather(1, index_RWL.flatten(1))
        exists_RWL = (word_W1 < count_R11) & (place_L < length_R11)
        return words_RX.view(index_RWL.shape).where(exists_RWL, UNUSED)


OUTSIDE = -2


class StepWords(NamedTuple):
    """List the words of some requests of a step; R counts these requests.

    which_R int64, place among the step's requests; words_RWL int32; before_RL int64, tokens left
    of the canvas
    """

    which_R: Tensor
    words_RWL: Tensor
    before_RL: Tensor


class BadWords(StepFeature):
    """Ban ids that would complete a word of several tokens."""

    reads = COPIED

    def __init__(self, states: CanvasStates, req_states: "RequestState") -> None:
        super().__init__(states)
        self.req_states = req_states
        self.table = WordTable(self.num_slots, self.device)
        self._step: list[StepWords] = []
        # Pairs of a logits row and an id that would complete a sequence there, int32 and int64.
        self._banned: list[tuple[Tensor, Tensor]] = []

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage the words of several tokens; single tokens are biases, see TokenRules."""
        words = [w for w in params.bad_words_token_ids or [] if len(w) > 1]
        self.table.add(slot, words)
        return bool(words)

    def remove_request(self, slot: int) -> None:
        """Free the slot's words, and those found in the last step."""
        self.table.remove(slot)
        self._step, self._banned = [], []

    def apply_staged_writes(self) -> None:
        """Copy the words of new requests to the device."""
        self.table.apply_staged_writes()

    def start_rows(self, rows: ReadRows) -> None:
        """Find which ids would complete a sequence in these canvases, and in which rows."""
        self._step, self._banned = [], []
        chosen_np = np.flatnonzero(self.users_np[rows.slots_np])
        for group_np in self._groups(chosen_np, rows.slots_np):
            which_R = self.upload(group_np)
            slots_R = rows.slots_R[which_R]
            words_RWL = self.table.words_of(slots_R, rows.slots_np[group_np])
            before_RL = self._tokens_before(slots_R, words_RWL.shape[2] - 1)
            words = StepWords(which_R, words_RWL, before_RL)
            self._step.append(words)
            tokens_RC = rows.canvas.tokens_RC[which_R]
            source_RC = rows.source_RC[which_R]
            banned = self._completing_ids(words, tokens_RC, source_RC)
            self._banned.append(banned)

    def _groups(self, chosen_np: np.ndarray, slots_np: np.ndarray) -> list[np.ndarray]:
        """Split requests with words into groups that are aligned at once."""
        slots_np, table = slots_np[chosen_np], self.table
        words = int(table.count_np[slots_np].max())
        length = int(table.length_np[slots_np].max())
        one = words * length * (self.num_positions + length - 1)
        most = max(1, ALIGNED_AT_ONCE // one)
        return np.split(chosen_np, range(most, len(chosen_np), most))

    def _tokens_before(self, slots_R: Tensor, count: int) -> Tensor:
        """Return the `count` tokens left of each canvas, int64 ``[R, count]``."""
        start_R1 = self.states.start_N[slots_R][:, None]
        index_RL = start_R1 - count + torch.arange(count, device=self.device)
        stored = self.req_states.all_token_ids.gpu
        tokens_RL = stored[slots_R[:, None], index_RL.clamp_min(0)]
        return tokens_RL.to(torch.int64).where(index_RL >= 0, OUTSIDE)

    def _completing_ids(
        self, words: StepWords, tokens_RC: Tensor, source_RC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the ids that fill the only hole in a sequence, with the row that predicts it."""
        window_RA1L, equal, used = _align(words, tokens_RC)
        hole = used & (window_RA1L == self.mask_id)
        if self.method.verifies:
            hole = _last(used)
        single_RAW = (hole.sum(-1) == 1) & ((equal | hole) == used).all(-1)
        place_RAW = hole.to(torch.int8).argmax(dim=-1)
        words_RAWL = words.words_RWL[:, None].expand_as(hole)
        token_RAW = words_RAWL.gather(3, place_RAW[..., None])[..., 0]
        # Alignment a, offset k is canvas position a + k - (L - 1).
        alignment_A = torch.arange(hole.shape[1], device=self.device)
        position_RAW = place_RAW + alignment_A[:, None] - (hole.shape[3] - 1)
        place_RAW = position_RAW.clamp(0, source_RC.shape[1] - 1)
        inside_RAW = place_RAW == position_RAW
        row_RX = source_RC.gather(1, place_RAW.flatten(1))
        # An id that completes nothing is replaced by the mask token, which is banned everywhere.
        token_RAW = token_RAW.where(single_RAW & inside_RAW, self.mask_id)
        return row_RX.flatten().to(torch.int32), token_RAW.flatten()

    def apply(self, logits_TV: Tensor, chunk: RowChunk, slots_np: np.ndarray) -> None:
        """Ban the ids that `start_rows` found, in the rows of a chunk."""
        rows_T = chunk.rows_T
        if not len(rows_T):
            return
        flat_X = logits_TV.view(-1)
        vocab_size = logits_TV.shape[1]
        for row, token in self._banned:
            local = torch.searchsorted(rows_T, row.to(rows_T.dtype))
            local = local.clamp_max(len(rows_T) - 1)
            # Ids of other rows are replaced by the mask token, which is banned everywhere.
            token = token.where(rows_T[local] == row, self.mask_id)
            flat_X.index_fill_(0, local * vocab_size + token, -torch.inf)

    def restrict(self, step: Step) -> None:
        """Keep the last new position masked of every sequence that the step would complete.

        To take back an edit restores the token that was there, which may complete another
        sequence: then all edits of the request are taken back.
        """
        if self.method.verifies:
            return
        for words in self._step:
            which_R = words.which_R
            asked_RC = step.unmask_RC[which_R]
            before_RC = step.canvas.tokens_RC[which_R]
            texts = words, before_RC, step.proposal.token_RC[which_R]
            kept_RC = _kept(*texts, asked_RC)
            edits_RC = asked_RC & (before_RC != self.mask_id)
            reverts_R1 = (edits_RC & ~kept_RC).any(dim=1, keepdim=True)
            without_RC = _kept(*texts, asked_RC & ~edits_RC)
            left_RC = without_RC.where(reverts_R1, kept_RC)
            step.unmask_RC = step.unmask_RC.index_copy(0, which_R, left_RC)


def _align(words: StepWords, tokens_RC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare every word with every alignment of the text around the canvas.

    Returns the tokens of each alignment ``[R, A, 1, L]``, whether they equal a word's, and whether
    the word has a token there, both bool ``[R, A, W, L]``.
    """
    _, words_RWL, before_RL = words
    length = words_RWL.shape[2]
    after_RL = tokens_RC.new_full((len(tokens_RC), length - 1), OUTSIDE)
    text = torch.cat([before_RL, tokens_RC, after_RL], dim=1)
    window_RA1L = text.unfold(1, length, 1)[:, :, None, :]
    words_R1WL = words_RWL[:, None]
    used = (words_R1WL != UNUSED).expand(-1, window_RA1L.shape[1], -1, -1)
    return window_RA1L, (window_RA1L == words_R1WL) & used, used


def _last(used: Tensor) -> Tensor:
    """Return the last token of each word, bool ``[R, A, W, L]``; words have no gaps."""
    length_RAW1 = used.sum(dim=-1, keepdim=True)
    stop_L = torch.arange(1, used.shape[3] + 1, device=used.device)
    return stop_L == length_RAW1


def _kept(
    words: StepWords, tokens_RC: Tensor, token_RC: Tensor, unmask_RC: Tensor
) -> Tensor:
    """Return the positions to write that complete no sequence, or are not its last new position."""
    tokens_RC = torch.where(unmask_RC, token_RC, tokens_RC)
    _, equal, used = _align(words, tokens_RC)
    complete_RAW = (equal == used).all(-1) & used.any(-1)
    length, num_positions = used.shape[3], unmask_RC.shape[1]
    pad, device = length - 1, unmask_RC.device
    padded = torch.nn.functional.pad(unmask_RC, (pad, pad))
    new = padded.unfold(1, length, 1)[:, :, None, :]
    new_RAWL = new & used & complete_RAW[..., None]
    offset_L = torch.arange(1, length + 1, device=device, dtype=torch.int8)
    last_RAW = (new_RAWL * offset_L).amax(dim=-1)
    drops_RAL = (last_RAW[..., None] == offset_L).any(dim=2)
    dropped_RC = torch.zeros_like(padded)
    stops = drops_RAL.shape[1]
    for offset, drops_RA in enumerate(drops_RAL.unbind(2)):
        dropped_RC[:, offset : offset + stops] |= drops_RA
    return unmask_RC & ~dropped_RC[:, pad : pad + num_positions]
