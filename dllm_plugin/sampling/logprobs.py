"""Log-probabilities of tokens at the step that unmasked them, kept until they are emitted.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N slots, K columns: the token itself, then
the most likely ones.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

from dllm_plugin.decoding.plan import StepOutcome
from dllm_plugin.sampling.logits_rows import at_rows
from dllm_plugin.state.canvas_states import CanvasStates


class EmittedLogprobs(NamedTuple):
    """Log-probabilities of what a step emits: the fields of vLLM's LogprobsTensors."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: list[int]


class LogprobStash:
    """ids_NCK int32, values_NCK float32, ranks_NC int64; made when a request first asks."""

    def __init__(self, states: CanvasStates, model_config: ModelConfig) -> None:
        self.states = states
        self.most = min(model_config.max_logprobs, model_config.get_vocab_size())
        self.num_logprobs_np = np.full(states.canvas_NC.shape[0], -1, dtype=np.int64)
        self.tables: tuple[Tensor, Tensor, Tensor] | None = None
        self.active = False
        self._columns = 0
        self._scored: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows: list[Tensor] = []

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Note how many log-probabilities a request wants; -1 in `params` means all."""
        wanted = params.logprobs
        self.num_logprobs_np[slot] = -1 if wanted is None else wanted if wanted >= 0 else self.most
        if wanted is not None and self.tables is None:
            shape, device = (*self.states.canvas_NC.shape, self.most + 1), self.states.device
            self.tables = (
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape, dtype=torch.float32, device=device),
                torch.zeros(shape[:2], dtype=torch.int64, device=device),
            )
            self.states.companions.extend(self.tables)

    def start_step(self, slots_np: np.ndarray) -> None:
        """Decide whether this step has to be scored."""
        most = int(self.num_logprobs_np[slots_np].max())
        self.active = most >= 0
        self._columns = most + 1
        self._scored, self._rows = [], []

    def score(self, logits_TV: Tensor, token_T: Tensor, rows_T: Tensor) -> None:
        """Score some rows: raw log-probabilities of the proposal and of the most likely tokens."""
        if not self.active:
            return
        logprobs_TV = logits_TV.to(torch.float32).log_softmax(dim=-1)
        chosen_T1 = logprobs_TV.gather(1, token_T[:, None])
        rank_T = (logprobs_TV >= chosen_T1).sum(dim=1)
        top = logprobs_TV.topk(self._columns - 1, dim=-1)
        ids_TK = torch.cat([token_T[:, None], top.indices], dim=1).to(torch.int32)
        self._scored.append((ids_TK, torch.cat([chosen_T1, top.values], dim=1), rank_T))
        self._rows.append(rows_T)

    def settle(
        self,
        source_RC: Tensor,
        num_rows: int,
        outcome: StepOutcome,
        emit_RC: Tensor,
        slots_R: Tensor,
        index_R: Tensor,
        num_reqs: int,
    ) -> EmittedLogprobs | None:
        """Keep what was unmasked, hand out what is emitted, and move on with the canvas.

        Returns rows for all canvas positions of all requests of the step; a request's rows start
        at a fixed offset, so that nothing has to be counted on the host.
        """
        if not self.active:
            return None
        assert self.tables is not None
        num_positions, columns = source_RC.shape[1], self._columns
        scored = zip(*self._scored, strict=True)
        fresh = [at_rows(part, self._rows, num_rows)[source_RC] for part in scored]
        unmask_RC = outcome.unmask_RC
        moved_R1 = outcome.num_committed_R.to(torch.int64)[:, None]
        index_RC = torch.arange(num_positions, device=source_RC.device) + moved_R1
        index_RC = index_RC.clamp_max(num_positions - 1)
        current = []
        for table, value in zip(self.tables, fresh, strict=True):
            # Tables hold more columns than a step with modest requests fills.
            view = table if table.dim() == 2 else table[:, :, :columns]
            mask = unmask_RC if value.dim() == 2 else unmask_RC[:, :, None]
            now = torch.where(mask, value, view[slots_R])
            index = index_RC if now.dim() == 2 else index_RC[:, :, None].expand_as(now)
            view[slots_R] = now.gather(1, index)
            emit = emit_RC if now.dim() == 2 else emit_RC[:, :, None].expand_as(now)
            current.append(now.gather(1, emit))
        ids, values, ranks = current
        return EmittedLogprobs(
            logprob_token_ids=_all_requests(ids, index_R, num_reqs),
            logprobs=_all_requests(values, index_R, num_reqs),
            selected_token_ranks=_all_requests(ranks, index_R, num_reqs),
            cu_num_generated_tokens=[i * num_positions for i in range(num_reqs + 1)],
        )

    def write_first(self, slots_R: Tensor, take_R: Tensor) -> None:
        """Keep what was scored last for the first position of some canvases."""
        if not self.active:
            return
        assert self.tables is not None
        columns = zip(*self._scored, strict=True)
        for table, values in zip(self.tables, map(torch.cat, columns), strict=True):
            view = table if table.dim() == 2 else table[:, :, : self._columns]
            mask = take_R if values.dim() == 1 else take_R[:, None]
            view[slots_R, 0] = torch.where(mask, values, view[slots_R, 0])


def _all_requests(rows: Tensor, index_R: Tensor, num_reqs: int) -> Tensor:
    """Put rows where their requests are in the batch and flatten requests and positions."""
    placed = rows.new_zeros(num_reqs, *rows.shape[1:])
    placed[index_R] = rows
    return placed.flatten(0, 1)
