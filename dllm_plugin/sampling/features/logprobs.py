"""Store log-probabilities of tokens, as they were when each was unmasked, until it is emitted.

If tokens move, the rows that wrote them belong to other texts: there all tokens have those of
the forward after which they are emitted: the one that stores their block, or decides the last one.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots, K columns: the token itself, then
the most likely ones.
"""

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

from dllm_plugin.kernels.confidence.reference import RowStats
from dllm_plugin.sampling.rows import RowChunk, scatter_rows
from dllm_plugin.sampling.step import EmittedLogprobs, Step
from dllm_plugin.state.canvas_states import CanvasStates

from .feature import ONCE, SCORED, ReadRows, StepFeature


class LogprobStash(StepFeature):
    """Store, per slot and canvas position, ids, log-probabilities and the rank of the token.

    tables           ids int32 and values float32 ``[N, C, K]``, ranks int64 ``[N, C]``; made for
                     the first request
    num_logprobs_np  most likely tokens that a slot's request wants; -1 for no log-probabilities
    """

    reads = SCORED

    def __init__(self, states: CanvasStates, model_config: ModelConfig) -> None:
        super().__init__(states)
        if self.method.inserts:  # their tokens are scored once they are decided
            self.reads = ONCE
        most = model_config.max_logprobs
        vocab_size = model_config.get_vocab_size()
        self.max_logprobs = min(most, vocab_size)
        self.num_logprobs_np = np.full(self.num_slots, -1, dtype=np.int64)
        self.tables: tuple[Tensor, Tensor, Tensor] | None = None
        self._columns = 0
        self._scored: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows: list[Tensor] = []

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Stage how many log-probabilities a request wants; -1 in `params` means all."""
        wanted = params.logprobs
        most = self.max_logprobs
        if wanted is None:
            self.num_logprobs_np[slot] = -1
            return False
        self.num_logprobs_np[slot] = most if wanted < 0 else wanted
        if self.tables is None:
            length = self.num_positions
            zeros = self.states.zeros
            self.tables = (
                zeros(torch.int32, length, most + 1),
                zeros(torch.float32, length, most + 1),
                zeros(torch.int64, length),
            )
            self.states.companions.extend(self.tables)
        return True

    def start_rows(self, rows: ReadRows) -> None:
        """Free the rows of the last step, and count the columns of this step."""
        self._columns = int(self.num_logprobs_np[rows.slots_np].max()) + 1
        self._scored, self._rows = [], []

    def score(self, raw_TV: Tensor, stats: RowStats, chunk: RowChunk) -> None:
        """Compute raw log-probabilities of proposals and of the most likely tokens."""
        if not self.method.inserts:
            self._score(raw_TV, stats.token_T, chunk.rows_T)

    def _score(self, raw_TV: Tensor, token_T: Tensor, rows_T: Tensor) -> None:
        token_T1 = token_T[:, None]
        logprobs_TV = raw_TV.to(torch.float32).log_softmax(dim=-1)
        chosen_T1 = logprobs_TV.gather(1, token_T1)
        rank_T = (logprobs_TV >= chosen_T1).sum(dim=1)
        top = logprobs_TV.topk(self._columns - 1, dim=-1)
        ids_TK = torch.cat([token_T1, top.indices], dim=1).to(torch.int32)
        values_TK = torch.cat([chosen_T1, top.values], dim=1)
        self._scored.append((ids_TK, values_TK, rank_T))
        self._rows.append(rows_T)

    def _score_canvases(self, step: Step, asks_R: Tensor) -> Tensor:
        """Score the tokens of canvases; return the place of each score, int64 ``[R, C]``."""
        low_R = step.drafts_R.cumsum(0) - step.drafts_R
        last_R1 = step.drafts_R[asks_R, None] - 1
        source_RC = low_R[asks_R, None] + torch.minimum(self.position_C, last_R1)
        place_RC = torch.arange(source_RC.numel(), device=self.device)
        logits_TV = step.chunks[0].logits_XV
        each = self.states.config.rows_at_once
        pieces = (source_RC.flatten(), step.tokens_RC[asks_R].flatten(), place_RC)
        for source_T, token_T, place_T in zip(
            *[piece.split(each) for piece in pieces], strict=True
        ):
            self._score(logits_TV[source_T], token_T, place_T)
        return place_RC.view_as(source_RC)

    def commit(self, step: Step) -> None:
        """Store what was unmasked, emit `step.logprobs`, and move on with the canvas.

        The result has rows for all canvas positions of the requests that asked; a request's rows
        start at a fixed offset, so that nothing has to be counted on the host. Tokens that a
        template gives are certain.
        """
        length = self.num_positions
        asks_np = np.flatnonzero(self.num_logprobs_np[step.slots_np] >= 0)
        asks_R = self.upload(asks_np)
        source_RC = step.source_RC[asks_R]
        slots_R = step.slots_R[asks_R]
        unmask_RC = step.outcome.unmask_RC[asks_R]
        num_rows = step.num_rows
        if self.method.inserts:
            source_RC = self._score_canvases(step, asks_R)
            unmask_RC = torch.ones_like(unmask_RC)
            num_rows = source_RC.numel()
        emit_RC = step.emit_RC[asks_R]
        moved_R = step.outcome.num_committed_R[asks_R]
        next_RC = self.position_C + moved_R.to(torch.int64)[:, None]
        next_RC = next_RC.clamp_max(length - 1)
        scored = zip(*self._scored, strict=True)
        emitted = []
        for place, table in enumerate(self._used_tables()):
            found = scatter_rows(next(scored), self._rows, num_rows)
            new = found[source_RC]
            now = new.where(_like(unmask_RC, new), table[slots_R])
            if step.given_RC is not None:
                token_RC1 = step.tokens_RC[asks_R, :, None].to(torch.int32)
                certain = (token_RC1, 0.0, 1)[place]
                given = _like(step.given_RC[asks_R], now)
                now = torch.where(given, certain, now)
            table[slots_R] = now.gather(1, _like(next_RC, now))
            emitted.append(now.gather(1, _like(emit_RC, now)).flatten(0, 1))
        # vLLM looks up the rows of a request by its place in the batch: no other rows are read.
        offsets_np = np.zeros(step.num_reqs + 1, dtype=np.int64)
        offsets_np[step.index_np[asks_np]] = np.arange(len(asks_np)) * length
        offsets = offsets_np.tolist()
        ids, values, ranks = emitted
        step.logprobs = EmittedLogprobs(ids, values, ranks, offsets)
        self._scored, self._rows = [], []

    def write_first(self, slots_R: Tensor, take_R: Tensor) -> None:
        """Store what was scored last for the first position of some canvases."""
        if not self._rows:
            return
        rows_T = torch.cat(self._rows)
        slots_R, take_R = slots_R[rows_T], take_R[rows_T]
        scored = zip(*self._scored, strict=True)
        for table, pieces in zip(self._used_tables(), scored, strict=True):
            values = torch.cat(pieces)
            before = table[slots_R, 0]
            now = values.where(_like(take_R, values), before)
            table[slots_R, 0] = now
        self._scored, self._rows = [], []

    def _used_tables(self) -> list[Tensor]:
        """Return the tables, cut to the columns that the requests of this step fill."""
        assert self.tables is not None
        ids, values, ranks = self.tables
        count = self._columns
        return [ids[:, :, :count], values[:, :, :count], ranks]


def _like(value: Tensor, other: Tensor) -> Tensor:
    """Return `value`, which is per position, repeated for each column that `other` has."""
    if value.dim() == other.dim():
        return value
    return value[..., None].expand_as(other)
