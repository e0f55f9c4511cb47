"""Propose the tokens of the likeliest valid text: requests with a token automaton.

The text agrees with everything that is decided, so whichever positions the policy picks, the canvas
still has a valid completion: nothing has to be checked. Its last state leaves room for what the
text lacks, so the text is complete when the budget ends. Shape letters as in
:mod:`dllm_plugin.kernels.automaton.reference`; R requests of the step, N slots.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.config.request.structured_outputs import no_automata
from dllm_plugin.grammar.step import AutomatonStart
from dllm_plugin.kernels.automaton import kernel, reference
from dllm_plugin.kernels.automaton.reference import (
    FAR,
    OPEN,
    OUTSIDE,
    Canvases,
    Path,
    Rows,
    Tables,
)
from dllm_plugin.sampling.rows import RowChunk
from dllm_plugin.sampling.step import LogitsRows, Step
from dllm_plugin.state.canvas_states import CanvasStates

from .automaton_tables import AutomatonTables
from .feature import StepFeature
from .penalties import Penalties
from .token_rules import TokenRules

# Float32 scores of canvases that are computed together.
SCORES_AT_ONCE = 1 << 25


class _Requests(NamedTuple):
    """List some requests of a step that have an automaton.

    row_G, row_np  int64, request of the step, on the device and on the host
    masked_GC      bool, positions that may take a token in this step
    """

    row_G: Tensor
    row_np: np.ndarray
    canvases: Canvases
    masked_GC: Tensor


class _Predicted(NamedTuple):
    """List rows of a logits tensor, and the positions that they predict.

    canvas_T, place_T  int64, canvas and position in it
    wanted_T           bool, the position takes its token from this row
    """

    rows: Rows
    canvas_T: Tensor
    place_T: Tensor
    wanted_T: Tensor


class Automata(StepFeature):
    """Move automata along the canvases of their requests.

    place_np    int64, place of a slot's automaton in the tables
    complete_np bool, whether its text has to be complete
    state_N     int64, one more than the state after the committed text; 0 before it is known
    """

    def __init__(
        self,
        states: CanvasStates,
        sampling_states: Any,
        rows: LogitsRows,
        rules: TokenRules,
        penalties: Penalties,
    ) -> None:
        super().__init__(states)
        self.sampling_states = sampling_states
        self.rows = rows
        self.rules = rules
        self.penalties = penalties
        self.stored = AutomatonTables(states.device)
        self.place_np = np.zeros(self.num_slots, dtype=np.int64)
        self.complete_np = np.zeros(self.num_slots, dtype=np.bool_)
        self.state_N: Tensor | None = None
        self.on_cpu = states.device.type == "cpu"
        kernels: Any = reference if self.on_cpu else kernel
        self.score_rows = kernels.score_rows
        self.choose_ids = kernels.choose_ids
        self.forward = kernels.forward
        self.backtrack = kernels.backtrack
        # Of this step: rows of its requests, and the states around each position of their texts.
        self._moves: tuple[Tensor, Tensor] | None = None

    def start(self, starts: Sequence[AutomatonStart]) -> None:
        """Store the automata of requests that start, or come back, in this step."""
        states = self.states
        if self.state_N is None:
            self.state_N = states.zeros(torch.int64)
            states.companions.append(self.state_N)
        known = []
        for start in starts:
            slot = states.req_id_to_slot[start.req_id]
            self.free(slot)
            self.place_np[slot] = self.stored.add(start.key, start.automaton)
            self.complete_np[slot] = start.completes
            self.mark(slot, True)
            known.append((slot, start.state + 1))
        known_np = np.array(known, dtype=np.int64)
        slots_G, state_G = self.upload(known_np).unbind(1)
        # A canvas that comes back brings the state before it.
        kept_G = self.state_N[slots_G]
        self.state_N[slots_G] = torch.where(kept_G > 0, kept_G, state_G)

    def warm_up(self, logits_XV: Tensor, carry_NV: Tensor | None) -> None:
        """Launch the kernels for all kinds of rows, unless the engine refuses automata."""
        if no_automata(self.states.config):
            return
        self._warm_up(logits_XV)
        if carry_NV is not None:
            self._warm_up(carry_NV)
        self._warm_up(logits_XV[:1].to(torch.float32))  # as penalised copies

    def _warm_up(self, logits_XV: Tensor) -> None:
        """Launch the kernels in all forms, for an automaton of one state."""
        device = logits_XV.device
        vocab_size = self.rules.vocab_size
        arrays = []
        for length in (vocab_size, vocab_size, 2, 1, 1, 1, 2, 1):
            arrays.append(torch.zeros(1, length, dtype=torch.int32, device=device))
        tables = Tables(*arrays)
        zero_G = torch.zeros(1, dtype=torch.int64, device=device)
        greedy_G = zero_G.to(torch.float32)
        given_GC = zero_G[:, None]
        canvases = Canvases(
            zero_G, zero_G, given_GC, zero_G, greedy_G, zero_G, zero_G, zero_G
        )
        table_MV = tables.class_AV.to(torch.float32)
        for bias in (None, (table_MV, zero_G)):
            numbers = (zero_G, zero_G, zero_G, greedy_G, zero_G, zero_G, zero_G)
            rows = Rows(logits_XV, *numbers, self.mask_id, bias)
            score_GCK = self.score_rows(tables, rows)[None]
            value_GCQ = self.forward(tables, canvases, score_GCK)
            path = self.backtrack(tables, canvases, score_GCK, value_GCQ)
            self.choose_ids(tables, rows, path.class_GC.flatten())

    def remove_request(self, slot: int) -> None:
        """Free the automaton of a slot."""
        self.stored.release(int(self.place_np[slot]))

    def start_step(self, step: Step) -> None:
        """Add rows to the step whose tokens are those of the texts."""
        row_np = np.flatnonzero(self.users_np[step.slots_np])
        columns = self.rows.num_columns(step)
        # In parts, so that the memory of scores has a bound.
        tables = self._tables()
        per_position = tables.bound_AK.shape[1] - 1 + tables.far_AQ.shape[1]
        num_scores = len(row_np) * columns * per_position
        num_parts = min(len(row_np), -(-num_scores // SCORES_AT_ONCE))
        parts = []
        for some_np in np.array_split(row_np, num_parts):
            parts.append(self._propose(step, some_np, columns))
        rows, states = zip(*parts, strict=True)
        self._moves = torch.cat(rows), torch.cat(states)

    def commit(self, step: Step) -> None:
        """Move the states on by what the canvases committed."""
        assert self.state_N is not None and self._moves is not None
        (row_G, state_GC1), self._moves = self._moves, None
        outcome = step.outcome
        planned_R = step.plan.num_committed_R
        moved_R = torch.where(outcome.ended_R, planned_R, outcome.num_committed_R)
        moved_G1 = moved_R[row_G, None].to(torch.int64)
        state_G = state_GC1.gather(1, moved_G1).squeeze(1)
        self.state_N[step.slots_R[row_G]] = state_G + 1

    def _tables(self) -> Tables:
        tables = self.stored.tables
        assert tables is not None
        return tables

    def _propose(
        self, step: Step, row_np: np.ndarray, columns: int
    ) -> tuple[Tensor, Tensor]:
        """Propose texts of some requests; no block is open after `columns` positions."""
        row_G = self.upload(row_np)
        tables = self._tables()
        canvases = self._canvases(step, row_G, row_np, columns)
        has_row_GC = self.rows.has_row(step)[row_G, :columns]
        masked_GC = (canvases.given_GC == OPEN) & has_row_GC
        masked_GC &= step.plan.candidates_RC[row_G, :columns]
        requests = _Requests(row_G, row_np, canvases, masked_GC)
        predicted = list(self._predicted(requests, step))
        # Scores of positions without a row do not count.
        shape = (*masked_GC.shape, tables.bound_AK.shape[1] - 1)
        score_GCK = torch.zeros(shape, device=self.device)
        for some in predicted:
            for cut, piece in self._pieces(some, step):
                place = some.canvas_T[cut], some.place_T[cut]
                wanted_T1 = some.wanted_T[cut, None]
                score_TK = self.score_rows(tables, piece)
                score_GCK[place] = score_TK.where(wanted_T1, score_GCK[place])
        value_GCQ = self.forward(tables, canvases, score_GCK)
        path = self.backtrack(tables, canvases, score_GCK, value_GCQ)
        for some in predicted:
            self._add_chosen(step, requests, some, path)
        return row_G, path.state_GC1

    def _canvases(
        self, step: Step, row_G: Tensor, row_np: np.ndarray, columns: int
    ) -> Canvases:
        """Return the leading columns of a step's canvases as kernels take them."""
        assert self.state_N is not None
        states = self.states
        sampling = self.sampling_states
        slots_np = step.slots_np[row_np]
        known = np.stack([self.place_np[slots_np], self.complete_np[slots_np]])
        which_G, completes_G = self.upload(known)
        slots_G = step.slots_R[row_G]
        canvas = step.canvas
        remaining_G = step.remaining_R[row_G].to(torch.int64)
        tokens_GC = canvas.tokens_RC[row_G, :columns]
        block_GC = canvas.block_RC[row_G, :columns]
        position_C = self.position_C[:columns]
        is_open_GC = block_GC < step.plan.open_R[row_G, None]
        is_text_GC = is_open_GC & (position_C < remaining_G[:, None])
        length_G = is_text_GC.sum(dim=1)
        is_text_GC &= position_C >= canvas.tail_R[row_G, None]
        class_AV = self._tables().class_AV
        class_GC = class_AV[which_G[:, None], tokens_GC].to(torch.int64)
        class_GC = class_GC.masked_fill(tokens_GC == self.mask_id, OPEN)
        return Canvases(
            which_G,
            (self.state_N[slots_G] - 1).clamp_min(0),
            class_GC.masked_fill(~is_text_GC, OUTSIDE),
            (remaining_G - length_G).masked_fill(completes_G == 0, FAR),
            sampling.temperature.gpu[slots_G],
            sampling.seeds.gpu[slots_G],
            states.counter_N[slots_G].to(torch.int64),
            states.start_N[slots_G],
        )

    def _predicted(self, requests: _Requests, step: Step) -> Iterator[_Predicted]:
        """Yield the rows of the canvases, then the carry rows, which predict first positions."""
        logits_XV, carry_NV = self.rows.sources(step)
        row_G, masked_GC = requests.row_G, requests.masked_GC
        source_GC = step.source_RC[row_G, : masked_GC.shape[1]]
        is_here_GC = source_GC < len(logits_XV)
        if len(logits_XV):
            source_GC = source_GC.clamp_max(len(logits_XV) - 1)
            wanted_GC = masked_GC & is_here_GC
            yield self._rows(requests, step, logits_XV, source_GC, wanted_GC)
        if carry_NV is not None:
            slot_G1 = step.slots_R[row_G, None]
            wanted_G1 = (masked_GC & ~is_here_GC)[:, :1]
            yield self._rows(requests, step, carry_NV, slot_G1, wanted_G1)

    def _rows(
        self,
        requests: _Requests,
        step: Step,
        logits_XV: Tensor,
        source_GC: Tensor,
        wanted_GC: Tensor,
    ) -> _Predicted:
        """Describe rows of a tensor; on GPUs also unwanted rows, since to count would wait."""
        if self.on_cpu:
            where = wanted_GC.nonzero(as_tuple=True)
        else:
            index_T = torch.arange(wanted_GC.numel(), device=self.device)
            width = wanted_GC.shape[1]
            where = index_T // width, index_T % width
        canvas_T, place_T = where
        canvases = requests.canvases
        rows = Rows(
            logits_XV,
            source_GC[where],
            step.slots_R[requests.row_G][canvas_T],
            canvases.which_G[canvas_T],
            canvases.temperature_G[canvas_T],
            canvases.seed_G[canvas_T],
            canvases.position_G[canvas_T] + place_T,
            canvases.step_G[canvas_T],
            self.mask_id,
            self.rules.biases(step.slots_np),
        )
        return _Predicted(rows, canvas_T, place_T, wanted_GC[where])

    def _pieces(self, some: _Predicted, step: Step) -> Iterator[tuple[slice, Rows]]:
        """Yield pieces small enough for float32 copies, penalised if a request asks for it."""
        most = self.states.config.rows_at_once
        for low in range(0, len(some.canvas_T), most):
            cut = slice(low, low + most)
            piece = some.rows.cut(cut)
            if self.penalties.active(step.slots_np):
                piece = self._penalised(piece, step)
            yield cut, piece

    def _penalised(self, rows: Rows, step: Step) -> Rows:
        """Return penalised copies of rows."""
        copies_TV = rows.logits_XV[rows.source_T].to(torch.float32, copy=True)
        if rows.bias is not None:
            bias_MV, row_N = rows.bias
            copies_TV += bias_MV[row_N[rows.slot_T]]
        self.penalties.penalise(copies_TV, rows.slot_T, step.slots_np)
        index_T = torch.arange(len(copies_TV), device=self.device)
        return rows._replace(logits_XV=copies_TV, source_T=index_T, bias=None)

    def _add_chosen(
        self, step: Step, requests: _Requests, some: _Predicted, path: Path
    ) -> None:
        """Add a chunk of rows whose tokens are chosen."""
        rows, canvas_T, place_T, wanted_T = some
        class_T = path.class_GC[canvas_T, place_T]
        tokens = [canvas_T[:0]]
        for cut, piece in self._pieces(some, step):
            tokens.append(self.choose_ids(self._tables(), piece, class_T[cut]))
        if self.on_cpu:
            owner_np = requests.row_np[canvas_T.numpy()]
        else:
            per_request = len(canvas_T) // len(requests.row_np)
            owner_np = np.repeat(requests.row_np, per_request)
        rows_T = step.new_rows(len(canvas_T))
        chunk = RowChunk(
            rows_T,
            rows.logits_XV,
            rows.slot_T,
            place_T.to(torch.int32),
            rows.source_T,
            owner_np=owner_np,
            token_T=torch.cat(tokens),
        )
        where = requests.row_G[canvas_T], place_T
        source_T = rows_T.where(wanted_T, step.source_RC[where])
        step.add_rows(chunk, where, source_T)
