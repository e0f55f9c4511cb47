"""Keep log-probabilities of tokens, as they were when each was unmasked, until it is emitted.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots, K columns: the token itself, then
the most likely ones.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import StepOutcome
from dllm_plugin.sampling.rows import StepRows, scatter_rows
from dllm_plugin.state.canvas_states import CanvasStates

ROWS_AT_ONCE = 8  # copies of a row's entries while they are scored, kept and emitted


class EmittedLogprobs(NamedTuple):
    """Hold log-probabilities of what a step emits: the fields of vLLM's LogprobsTensors."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: list[int]


class LogprobStash:
    """Keep, per slot and canvas position, ids, log-probabilities and the rank of the token.

    tables           ids int32 and values float32 ``[N, C, K]``, ranks int64 ``[N, C]``; made when
                     a request first asks
    num_logprobs_np  most likely tokens that a slot's request wants; -1 for no log-probabilities
    active           whether a request of this step wants any
    """

    def __init__(self, states: CanvasStates, model_config: ModelConfig) -> None:
        self.states = states
        self.max_logprobs = min(
            model_config.max_logprobs, model_config.get_vocab_size()
        )
        self.num_logprobs_np = np.full(states.canvas_NC.shape[0], -1, dtype=np.int64)
        self.tables: tuple[Tensor, Tensor, Tensor] | None = None
        self.active = False
        self._columns = 0
        self._scored: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows: list[Tensor] = []

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Note how many log-probabilities a request wants; -1 in `params` means all."""
        if params.logprobs is None:
            self.num_logprobs_np[slot] = -1
            return
        wants_all = params.logprobs < 0
        self.num_logprobs_np[slot] = self.max_logprobs if wants_all else params.logprobs
        if self.tables is None:
            shape = (*self.states.canvas_NC.shape, self.max_logprobs + 1)
            device = self.states.device
            self.tables = (
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape, dtype=torch.float32, device=device),
                torch.zeros(shape[:2], dtype=torch.int64, device=device),
            )
            self.states.companions.extend(self.tables)

    def most_bytes(self, num_rows: int) -> int:
        """Return how much memory the tables take, and a step of `num_rows` rows at most."""
        cell = torch.int32.itemsize + torch.float32.itemsize
        entry = cell * (self.max_logprobs + 1) + torch.int64.itemsize
        return entry * (self.states.canvas_NC.numel() + ROWS_AT_ONCE * num_rows)

    def start_step(self, slots_np: np.ndarray) -> None:
        """Forget the rows of the last step, and see whether this one has to be scored."""
        most = int(self.num_logprobs_np[slots_np].max())
        self.active = most >= 0
        self._columns = most + 1
        self._scored, self._rows = [], []

    def score(self, logits_TV: Tensor, token_T: Tensor, rows_T: Tensor) -> None:
        """Score some rows: raw log-probabilities of the proposal and of the most likely tokens."""
        logprobs_TV = logits_TV.to(torch.float32).log_softmax(dim=-1)
        chosen_T1 = logprobs_TV.gather(1, token_T[:, None])
        rank_T = (logprobs_TV >= chosen_T1).sum(dim=1)
        top = logprobs_TV.topk(self._columns - 1, dim=-1)
        ids_TK = torch.cat([token_T[:, None], top.indices], dim=1).to(torch.int32)
        self._scored.append((ids_TK, torch.cat([chosen_T1, top.values], dim=1), rank_T))
        self._rows.append(rows_T)

    def commit(
        self,
        step: StepRows,
        outcome: StepOutcome,
        emit_RC: Tensor,
        num_reqs: int,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> EmittedLogprobs | None:
        """Keep what was unmasked, return what is emitted, and move on with the canvas.

        The result has rows for all canvas positions of the requests that asked; a request's rows
        start at a fixed offset, so that nothing has to be counted on the host.

        Args:
            given: which positions a template gives, and the canvas: these tokens are certain.
        """
        if not self.active:
            return None
        asks_np = np.flatnonzero(self.num_logprobs_np[step.slots_np] >= 0)
        asks_R = async_tensor_h2d(asks_np, device=self.states.device)
        source_RC, slots_R = step.source_RC[asks_R], step.slots_R[asks_R]
        unmask_RC, emit_RC = outcome.unmask_RC[asks_R], emit_RC[asks_R]
        num_positions = source_RC.shape[1]
        moved_R1 = outcome.num_committed_R[asks_R].to(torch.int64)[:, None]
        next_RC = torch.arange(num_positions, device=source_RC.device) + moved_R1
        next_RC = next_RC.clamp_max(num_positions - 1)
        scored = zip(*self._scored, strict=True)
        emitted = []
        for place, (table, values) in enumerate(
            zip(self._used_tables(), scored, strict=True)
        ):
            new = scatter_rows(values, self._rows, step.num_rows)[source_RC]
            now = torch.where(_like(unmask_RC, new), new, table[slots_R])
            if given is not None:
                certain = (given[1][asks_R, :, None].to(torch.int32), 0.0, 1)
                now = torch.where(_like(given[0][asks_R], now), certain[place], now)
            table[slots_R] = now.gather(1, _like(next_RC, now))
            emitted.append(now.gather(1, _like(emit_RC, now)).flatten(0, 1))
        ids, logprobs, ranks = emitted
        # vLLM looks up the rows of a request by its place in the batch: nobody else's are read.
        offsets_np = np.zeros(num_reqs + 1, dtype=np.int64)
        offsets_np[step.index_np[asks_np]] = np.arange(len(asks_np)) * num_positions
        return EmittedLogprobs(ids, logprobs, ranks, offsets_np.tolist())

    def write_first(self, slots_R: Tensor, take_R: Tensor) -> None:
        """Keep what was scored last for the first position of some canvases."""
        if not self.active:
            return
        rows_T = torch.cat(self._rows)
        slots_R, take_R = slots_R[rows_T], take_R[rows_T]
        scored = zip(*self._scored, strict=True)
        for table, values in zip(
            self._used_tables(), map(torch.cat, scored), strict=True
        ):
            table[slots_R, 0] = torch.where(
                _like(take_R, values), values, table[slots_R, 0]
            )

    def _used_tables(self) -> list[Tensor]:
        """Return the tables, cut to as many columns as the requests of this step fill."""
        assert self.tables is not None
        return [t if t.dim() == 2 else t[:, :, : self._columns] for t in self.tables]


def _like(value: Tensor, other: Tensor) -> Tensor:
    """Return `value`, which is per position, repeated for each column that `other` has."""
    return value if value.dim() == other.dim() else value[..., None].expand_as(other)
