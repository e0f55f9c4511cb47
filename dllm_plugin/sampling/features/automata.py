"""Give masked positions the tokens of the likeliest valid text: requests with a token automaton.

The text agrees with everything that is decided, so whichever positions the policy picks, the canvas
still has a valid completion: there is nothing to check, and nothing is lost. Its last state leaves
room for what the text lacks, so it is complete when the budget ends. Nothing of this runs in a step
without such a request. Shape letters as in :mod:`dllm_plugin.kernels.automaton.reference`; R
requests of the step, N slots.

Hold the automata of running requests on the device, each once. Letters as in their kernels.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.decoding.plan import StepOutcome
from dllm_plugin.grammar.automaton import TokenAutomaton
from dllm_plugin.grammar.payload import AutomatonStart
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
from dllm_plugin.sampling.features.grammars import LogitsRows
from dllm_plugin.sampling.features.token_rules import TokenRules
from dllm_plugin.sampling.rows import CHUNK_ROWS, RowChunk, StepRows
from dllm_plugin.state.canvas_states import CanvasStates

# Tables of more than so many times the needed room are made smaller: a step computes all of it.
SPARE = 4


class AutomatonTables:
    """Hold automata by a key, padded alike; made anew when they need more room, or far less.

    tables  what kernels read; None before the first automaton
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: Tables | None = None
        self._places: dict[Hashable, int] = {}
        self._held: list[tuple[Hashable, TokenAutomaton] | None] = []
        self._users: list[int] = []
        self._sizes = (1, 1, 1)  # states, classes and edges that there is room for

    def add(self, key: Hashable, automaton: TokenAutomaton) -> int:
        """Hold an automaton for one more user; return its place."""
        if key in self._places:
            place = self._places[key]
            self._users[place] += 1
            return place
        if None not in self._held:
            self._held.append(None)
            self._users.append(0)
        place = self._held.index(None)
        self._held[place], self._users[place] = (key, automaton), 1
        self._places[key] = place
        needed = [
            max(s)
            for s in zip(*(one[1].sizes for one in self._held if one), strict=True)
        ]
        grows = self.tables is None or place >= len(self.tables.far_AQ)
        pairs = list(zip(needed, self._sizes, strict=True))
        if grows or any(size > room or size * SPARE < room for size, room in pairs):
            states, classes, edges = (1 << (size - 1).bit_length() for size in needed)
            self._sizes = states, classes, edges
            self._make()
        else:
            assert self.tables is not None
            for table, row in zip(self.tables, self._padded(automaton), strict=True):
                async_tensor_h2d(row, out=table[place])
        return place

    def release(self, place: int) -> None:
        """Forget an automaton once nobody uses it; its rows stay until another one takes them."""
        self._users[place] -= 1
        held = self._held[place]
        if not self._users[place] and held is not None:
            del self._places[held[0]]
            self._held[place] = None

    def _make(self) -> None:
        """Make the tables of all automata; rows of none are copies of another one's."""
        spare = next(held for held in self._held if held is not None)
        rows = 1 << (len(self._held) - 1).bit_length()
        held = [*self._held, *([None] * (rows - len(self._held)))]
        columns = zip(*(self._padded((one or spare)[1]) for one in held), strict=True)
        self.tables = Tables(
            *(
                async_tensor_h2d(np.stack(column), device=self.device)
                for column in columns
            )
        )

    def _padded(self, automaton: TokenAutomaton) -> list[np.ndarray]:
        """Return an automaton's arrays at the size of the tables."""
        states, classes, edges = self._sizes
        width = len(automaton.class_V)
        lengths = (width, width, classes + 1, edges, edges, edges, states + 1, states)
        ends = (0, 0, width, 0, 0, 0, automaton.sizes[2], FAR)
        padded = []
        for array, length, end in zip(automaton, lengths, ends, strict=True):
            row = np.full(length, end, dtype=np.int32)
            row[: len(array)] = array
            padded.append(row)
        return padded


NONE = -1
SCORES_AT_ONCE = 1 << 25  # float32 numbers of canvases that are looked at together


class AutomatonStep(NamedTuple):
    """Hold the requests of a step that have an automaton, and their texts.

    row_G       int64, request of the step
    state_GC1   int64, states in front of each position of their texts, and behind the last
    """

    row_G: Tensor
    state_GC1: Tensor


class _Asking(NamedTuple):
    """Hold the requests of a step that have an automaton.

    row_G, row_np  int64, request of the step, on the device and on the host
    masked_GC      bool, positions that may take a token in this step
    """

    row_G: Tensor
    row_np: np.ndarray
    canvases: Canvases
    masked_GC: Tensor


class _Found(NamedTuple):
    """Hold rows of a logits tensor, and what they predict.

    canvas_T, place_T  int64, canvas and position in it
    wanted_T           bool, the position takes its token from this row
    """

    rows: Rows
    canvas_T: Tensor
    place_T: Tensor
    wanted_T: Tensor


class Automata:
    """Follow automata through the canvases of their requests.

    place_np   int64, place of a slot's automaton in the tables, NONE without one
    complete_np bool, its text has to be complete
    state_N    int64, one more than the state behind the committed text; 0 before it is known
    """

    def __init__(
        self, states: CanvasStates, sampling_states: Any, rules: TokenRules
    ) -> None:
        self.states = states
        self.sampling_states = sampling_states
        self.rules = rules
        num_slots = len(states.open_N)
        self.held = AutomatonTables(states.device)
        self.place_np = np.full(num_slots, NONE, dtype=np.int64)
        self.complete_np = np.zeros(num_slots, dtype=np.bool_)
        self.state_N: Tensor | None = None
        on_cpu = states.device.type == "cpu"
        self.score_rows = (reference if on_cpu else kernel).score_rows
        self.choose_ids = (reference if on_cpu else kernel).choose_ids
        self.forward = (reference if on_cpu else kernel).forward
        self.backtrack = (reference if on_cpu else kernel).backtrack
        self.on_cpu = on_cpu

    def start(self, starts: Sequence[AutomatonStart]) -> None:
        """Take the automata of requests that start, or come back, in this step."""
        device = self.states.device
        if self.state_N is None:
            self.state_N = torch.zeros(
                len(self.place_np), dtype=torch.int64, device=device
            )
            self.states.companions.append(self.state_N)
        slots = [self.states.req_id_to_slot[start.req_id] for start in starts]
        for slot, start in zip(slots, starts, strict=True):
            self.remove_request(slot)
            self.place_np[slot] = self.held.add(start.key, start.automaton)
            self.complete_np[slot] = start.completes
        known = np.array([slots, [start.state + 1 for start in starts]], dtype=np.int64)
        slots_G, state_G = async_tensor_h2d(known, device=device)
        # What comes back with its canvas comes back with the state in front of it.
        kept_G = self.state_N[slots_G]
        self.state_N[slots_G] = torch.where(kept_G > 0, kept_G, state_G)

    def warm_up(self, logits_XV: Tensor) -> None:
        """Launch the kernels in all forms, for an automaton of one state."""
        device, vocab_size = logits_XV.device, self.rules.vocab_size
        lengths = vocab_size, vocab_size, 2, 1, 1, 1, 2, 1
        tables = Tables(
            *(torch.zeros(1, n, dtype=torch.int32, device=device) for n in lengths)
        )
        none_G = torch.zeros(1, dtype=torch.int64, device=device)
        greedy_G, given_GC = none_G.to(torch.float32), none_G[:, None]
        canvases = Canvases(
            none_G, none_G, given_GC, none_G, greedy_G, none_G, none_G, none_G
        )
        mask_id = self.states.config.mask_token_id
        bias = tables.class_AV.to(torch.float32), none_G
        read = (
            logits_XV,
            none_G,
            none_G,
            none_G,
            greedy_G,
            none_G,
            none_G,
            none_G,
            mask_id,
        )
        for rows in (Rows(*read, None), Rows(*read, bias)):
            score_GCK = self.score_rows(tables, rows)[None]
            value_GCQ = self.forward(tables, canvases, score_GCK)
            path = self.backtrack(tables, canvases, score_GCK, value_GCQ)
            self.choose_ids(tables, rows, path.class_GC.flatten())

    def remove_request(self, slot: int) -> None:
        """Forget the automaton of a slot."""
        if self.place_np[slot] != NONE:
            self.held.release(int(self.place_np[slot]))
            self.place_np[slot] = NONE

    def propose(
        self, step: StepRows, rows: LogitsRows
    ) -> tuple[StepRows, AutomatonStep | None]:
        """Return the step with rows more, whose tokens are those of the texts."""
        row_np = np.flatnonzero(self.place_np[step.slots_np] != NONE)
        if not len(row_np):
            return step, None
        parts, columns = [], rows.num_columns(step)
        for some_np in np.array_split(row_np, self._num_parts(len(row_np), columns)):
            step, part = self._propose_some(step, rows, some_np, columns)
            parts.append(part)
        return step, AutomatonStep(*map(torch.cat, zip(*parts, strict=True)))

    def _num_parts(self, num_canvases: int, columns: int) -> int:
        """Return in how many parts canvases are looked at, so that memory has a bound."""
        tables = self.held.tables
        assert tables is not None
        per_position = tables.bound_AK.shape[1] - 1 + tables.far_AQ.shape[1]
        numbers = num_canvases * columns * per_position
        return min(num_canvases, -(-numbers // SCORES_AT_ONCE))

    def _propose_some(
        self, step: StepRows, rows: LogitsRows, row_np: np.ndarray, columns: int
    ) -> tuple[StepRows, AutomatonStep]:
        """Do as `propose` for some requests of the step; no block is open behind `columns`."""
        row_G = async_tensor_h2d(row_np, device=self.states.device)
        canvases, tables = (
            self._canvases(step, row_G, row_np, columns),
            self.held.tables,
        )
        assert tables is not None
        masked_GC = (canvases.given_GC == OPEN) & rows.has_row(step)[row_G, :columns]
        masked_GC &= step.plan.candidates_RC[row_G, :columns]
        asking = _Asking(row_G, row_np, canvases, masked_GC)
        found = list(self._find(asking, step, rows))
        # Positions without a row may hold anything.
        num_classes = tables.bound_AK.shape[1] - 1
        score_GCK = torch.zeros(*masked_GC.shape, num_classes, device=row_G.device)
        for one in found:
            for cut, piece in _pieces(one):
                place = one.canvas_T[cut], one.place_T[cut]
                score_TK, wanted_T1 = (
                    self.score_rows(tables, piece),
                    one.wanted_T[cut, None],
                )
                score_GCK[place] = torch.where(wanted_T1, score_TK, score_GCK[place])
        value_GCQ = self.forward(tables, canvases, score_GCK)
        path = self.backtrack(tables, canvases, score_GCK, value_GCQ)
        for one in found:
            step = self._with_chosen(step, asking, one, path)
        return step, AutomatonStep(row_G, path.state_GC1)

    def _canvases(
        self, step: StepRows, row_G: Tensor, row_np: np.ndarray, columns: int
    ) -> Canvases:
        """Return the leading columns of a step's canvases as kernels take them."""
        states, sampling, slots_np = (
            self.states,
            self.sampling_states,
            step.slots_np[row_np],
        )
        assert self.held.tables is not None and self.state_N is not None
        known = np.stack([self.place_np[slots_np], self.complete_np[slots_np]]).astype(
            np.int64
        )
        which_G, completes_G = async_tensor_h2d(known, device=states.device)
        slots_G, canvas = step.slots_R[row_G], step.canvas
        remaining_G = step.remaining_R[row_G].to(torch.int64)
        tokens_GC = canvas.tokens_RC[row_G, :columns]
        position_C = torch.arange(columns, device=states.device)
        is_open_GC = canvas.block_RC[row_G, :columns] < step.plan.open_R[row_G, None]
        is_text_GC = is_open_GC & (position_C < remaining_G[:, None])
        length_G = is_text_GC.sum(dim=1)
        is_text_GC &= position_C >= canvas.tail_R[row_G, None]
        class_GC = self.held.tables.class_AV[which_G[:, None], tokens_GC].to(
            torch.int64
        )
        is_masked_GC = tokens_GC == states.config.mask_token_id
        return Canvases(
            which_G,
            (self.state_N[slots_G] - 1).clamp_min(0),
            class_GC.masked_fill(is_masked_GC, OPEN).masked_fill(~is_text_GC, OUTSIDE),
            (remaining_G - length_G).masked_fill(completes_G == 0, FAR),
            sampling.temperature.gpu[slots_G],
            sampling.seeds.gpu[slots_G],
            states.counter_N[slots_G].to(torch.int64),
            states.start_N[slots_G],
        )

    def _find(
        self, asking: _Asking, step: StepRows, rows: LogitsRows
    ) -> Iterator[_Found]:
        """Yield the rows of the canvases, then the carry rows, which predict first positions."""
        logits_XV, carry_NV = rows.sources(step)
        masked_GC = asking.masked_GC
        source_GC = step.source_RC[asking.row_G, : masked_GC.shape[1]]
        is_here_GC = source_GC < len(logits_XV)
        if len(logits_XV):
            yield self._rows(
                asking,
                step,
                logits_XV,
                source_GC.clamp_max(len(logits_XV) - 1),
                masked_GC & is_here_GC,
            )
        if carry_NV is not None:
            slot_G1 = step.slots_R[asking.row_G, None]
            wanted_G1 = (masked_GC & ~is_here_GC)[:, :1]
            yield self._rows(asking, step, carry_NV, slot_G1, wanted_G1)

    def _rows(
        self,
        asking: _Asking,
        step: StepRows,
        logits_XV: Tensor,
        source_GC: Tensor,
        wanted_GC: Tensor,
    ) -> _Found:
        """Describe rows of a tensor; on devices also unwanted ones, since to count would wait."""
        if self.on_cpu:
            canvas_T, place_T = wanted_GC.nonzero(as_tuple=True)
        else:
            index_T = torch.arange(wanted_GC.numel(), device=wanted_GC.device)
            canvas_T, place_T = (
                index_T // wanted_GC.shape[1],
                index_T % wanted_GC.shape[1],
            )
        canvases = asking.canvases
        rows = Rows(
            logits_XV,
            source_GC[canvas_T, place_T],
            step.slots_R[asking.row_G][canvas_T],
            canvases.which_G[canvas_T],
            canvases.temperature_G[canvas_T],
            canvases.seed_G[canvas_T],
            canvases.position_G[canvas_T] + place_T,
            canvases.step_G[canvas_T],
            self.states.config.mask_token_id,
            self.rules.biases(step.slots_np),
        )
        return _Found(rows, canvas_T, place_T, wanted_GC[canvas_T, place_T])

    def _with_chosen(
        self, step: StepRows, asking: _Asking, found: _Found, path: Path
    ) -> StepRows:
        """Return the step with a chunk of rows whose tokens are chosen."""
        tables, (rows, canvas_T, place_T, wanted_T) = self.held.tables, found
        assert tables is not None
        class_T = path.class_GC[canvas_T, place_T]
        tokens = [
            self.choose_ids(tables, piece, class_T[cut])
            for cut, piece in _pieces(found)
        ]
        if self.on_cpu:
            owner_np = asking.row_np[canvas_T.numpy()]
        else:
            owner_np = np.repeat(asking.row_np, len(canvas_T) // len(asking.row_np))
        rows_T = step.num_rows + torch.arange(len(canvas_T), device=canvas_T.device)
        chunk = RowChunk(
            rows_T,
            rows.logits_XV,
            rows.source_T,
            rows.slot_T,
            place_T.to(torch.int32),
            0,
            owner_np=owner_np,
            token_T=torch.cat([canvas_T[:0], *tokens]),
        )
        where = asking.row_G[canvas_T], place_T
        source_T = torch.where(wanted_T, rows_T, step.source_RC[where])
        return step._replace(
            source_RC=step.source_RC.index_put(where, source_T),
            num_rows=step.num_rows + len(rows_T),
            chunks=[*step.chunks, chunk],
        )

    def advance(
        self, found: AutomatonStep, step: StepRows, outcome: StepOutcome
    ) -> None:
        """Move the states on with what the canvases committed."""
        assert self.state_N is not None
        row_G, state_GC1 = found
        planned_R = step.plan.num_committed_R  # of these requests nothing is edited
        moved_R = torch.where(outcome.ended_R, planned_R, outcome.num_committed_R)
        moved_G1 = moved_R[row_G, None].to(torch.int64)
        self.state_N[step.slots_R[row_G]] = state_GC1.gather(1, moved_G1).squeeze(1) + 1


def _pieces(found: _Found) -> Iterator[tuple[slice, Rows]]:
    """Cut rows into pieces of which float32 copies may be made."""
    rows = found.rows
    for low in range(0, len(found.canvas_T), CHUNK_ROWS):
        cut = slice(low, low + CHUNK_ROWS)
        yield (
            cut,
            rows._replace(
                source_T=rows.source_T[cut],
                slot_T=rows.slot_T[cut],
                which_T=rows.which_T[cut],
                temperature_T=rows.temperature_T[cut],
                seed_T=rows.seed_T[cut],
                position_T=rows.position_T[cut],
                step_T=rows.step_T[cut],
            ),
        )
