"""Find the likeliest text of a token automaton for each canvas: the plain-torch reference.

It is what CPUs run. Scores of a class of ids are those of its best id, so a step of the Viterbi
algorithm looks only at classes (DINGO, arXiv 2505.23061). If a request samples, classes score
the sum of their probabilities, states are summed instead of maximised (forward filtering), and the
text is drawn from its end (backward sampling): an exact draw from the product of the rows'
distributions, given that the text is valid.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; G canvases, A automata of the tables, Q
states, K classes, E edges, X rows of a logits tensor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dllm_plugin.kernels.confidence.reference import add_bias, gumbel_uniform

END = 0  # state after a stop token
OPEN = -1  # class of an undecided position
OUTSIDE = -2  # class of a position outside the text
FAR = 2**30  # ids that a text lacks that can never be complete
LOW, HIGH = -1e30, 1e30  # what infinite logits count as
NEVER = float("-inf")
# Separate random numbers by their use: xor-ed into the seed. Tokens use the seed as it is.
EDGE, LAST = 0xED6E, 0x1A57


class Tables(NamedTuple):
    """Store automata, each padded to the largest; int32.

    class_AV, order_AV  class of each id, and ids by class
    bound_AK            where classes start in `order_AV`; K + 1 columns
    source_AE, class_AE, target_AE  edges by target; padding leads from END to END by class 0
    first_AQ            where edges into a state start; Q + 1 columns
    far_AQ              ids that a text lacks at least; FAR for padding
    """

    class_AV: Tensor
    order_AV: Tensor
    bound_AK: Tensor
    source_AE: Tensor
    class_AE: Tensor
    target_AE: Tensor
    first_AQ: Tensor
    far_AQ: Tensor


class Canvases(NamedTuple):
    """List canvases with an automaton.

    which_G      int64, its place in the tables
    state_G      int64, state in front of the first position
    given_GC     int64, class of a decided token, OPEN or OUTSIDE
    room_G       int64, ids that may follow the canvas; FAR if the text need not be complete
    temperature_G float32, 0 if the best text is wanted
    seed_G, step_G int64, counters of random numbers
    position_G   int64, absolute position of the first canvas position
    """

    which_G: Tensor
    state_G: Tensor
    given_GC: Tensor
    room_G: Tensor
    temperature_G: Tensor
    seed_G: Tensor
    step_G: Tensor
    position_G: Tensor


class Rows(NamedTuple):
    """List T logits rows and how they are read.

    source_T     int64, row of `logits_XV`
    which_T      int64, place of its automaton in the tables
    temperature_T float32, 0 if the best id is wanted
    seed_T, position_T, step_T  int64, counters of random numbers
    mask_id      the id that is always banned
    bias         as in :func:`dllm_plugin.kernels.confidence.reference.propose_rows`, by `slot_T`
    """

    logits_XV: Tensor
    source_T: Tensor
    slot_T: Tensor
    which_T: Tensor
    temperature_T: Tensor
    seed_T: Tensor
    position_T: Tensor
    step_T: Tensor
    mask_id: int
    bias: tuple[Tensor, Tensor] | None

    def cut(self, places: slice) -> "Rows":
        """Return some of the rows."""
        logits_XV, *columns, mask_id, bias = self
        some = [column[places] for column in columns]
        return Rows._make((logits_XV, *some, mask_id, bias))


class Path(NamedTuple):
    """Store a text per canvas: int64 class of each position, and the state before each.

    state_GC1 int64, C + 1 of them; the last state follows the canvas.
    """

    class_GC: Tensor
    state_GC1: Tensor


def _read(rows: Rows) -> Tensor:
    """Return rows as float32 ``[T, V]``, finite, divided by their temperature; the mask is banned.

    NaN and infinity become the largest number, so that a broken row is chosen, and then noticed.
    """
    logits_TV = rows.logits_XV[rows.source_T].to(torch.float32, copy=True)
    if rows.bias is not None:
        add_bias(logits_TV, rows.bias, rows.slot_T)
    logits_TV = logits_TV.nan_to_num(HIGH, HIGH, LOW).clamp(LOW, HIGH)
    logits_TV[:, rows.mask_id] = LOW
    return logits_TV / rows.temperature_T.where(rows.temperature_T > 0, 1.0)[:, None]


def score_rows(tables: Tables, rows: Rows) -> Tensor:
    """Return the log-probability of the best id of each class, or of all its ids: ``[T, K]``.

    Of all its ids if the row samples. Classes without ids are never looked at.
    """
    logits_TV = _read(rows)
    class_TV = tables.class_AV[rows.which_T].to(torch.int64)
    shape = (len(logits_TV), tables.bound_AK.shape[1] - 1)
    top_TK = logits_TV.new_full(shape, NEVER)
    top_TK.scatter_reduce_(1, class_TV, logits_TV, "amax")
    share_TV = (logits_TV - top_TK.gather(1, class_TV)).exp()
    sum_TK = logits_TV.new_zeros(shape).scatter_add_(1, class_TV, share_TV)
    mass_TK = sum_TK.log() + top_TK
    score_TK = torch.where(rows.temperature_T[:, None] > 0, mass_TK, top_TK)
    return (score_TK - mass_TK.logsumexp(dim=1, keepdim=True)).clamp_min(LOW)


def choose_ids(tables: Tables, rows: Rows, class_T: Tensor) -> Tensor:
    """Return the best id of a class in each row, or one that is sampled from it, int64 ``[T]``."""
    logits_TV = _read(rows)
    logits_TV.masked_fill_(tables.class_AV[rows.which_T] != class_T[:, None], NEVER)
    counters = rows.seed_T, rows.position_T, rows.step_T
    return _choose(logits_TV, rows.temperature_T, counters)


def forward(tables: Tables, canvases: Canvases, score_GCK: Tensor) -> Tensor:
    """Return the value of each state before each position, float32 ``[G, C + 1, Q]``.

    That is the score of the best text which leads there, or the logarithm of the sum over all.
    """
    which_G = canvases.which_G
    edges = _edges(tables, which_G)
    value_GQ = score_GCK.new_full((len(which_G), tables.far_AQ.shape[1]), NEVER)
    value_GQ.scatter_(1, canvases.state_G[:, None], 0.0)
    values, length = [value_GQ], _text_length(canvases)
    for place in range(length):
        given_G1 = canvases.given_GC[:, place, None]
        total_GE = _totals(edges, score_GCK[:, place], given_G1, value_GQ)
        best_GQ = torch.full_like(value_GQ, NEVER)
        best_GQ.scatter_reduce_(1, edges.target_GE, total_GE, "amax")
        base_GQ = best_GQ.where(best_GQ > NEVER, 0.0)
        share_GE = (total_GE - base_GQ.gather(1, edges.target_GE)).exp()
        mass_GQ = torch.zeros_like(value_GQ).scatter_add_(1, edges.target_GE, share_GE)
        next_GQ = torch.where(
            canvases.temperature_G[:, None] > 0, mass_GQ.log() + base_GQ, best_GQ
        )
        value_GQ = torch.where(given_G1 == OUTSIDE, value_GQ, next_GQ)
        values.append(value_GQ)
    values += [value_GQ] * (score_GCK.shape[1] - length)
    return torch.stack(values, dim=1)


def _text_length(canvases: Canvases) -> int:
    """Return the number of columns up to the last with text in any canvas."""
    columns = (canvases.given_GC != OUTSIDE).any(dim=0).nonzero()
    return int(columns.max()) + 1 if len(columns) else 0


class _Edges(NamedTuple):
    """List the edges of each canvas's automaton.

    source_GE, class_GE, target_GE  int64
    ends_GE     bool, it is after the end: what stands there is no text and costs nothing
    """

    source_GE: Tensor
    class_GE: Tensor
    target_GE: Tensor
    ends_GE: Tensor


def _edges(tables: Tables, which_G: Tensor) -> _Edges:
    columns = (tables.source_AE, tables.class_AE, tables.target_AE)
    source_GE, class_GE, target_GE = (
        table[which_G].to(torch.int64) for table in columns
    )
    return _Edges(source_GE, class_GE, target_GE, source_GE == END)


def _totals(
    edges: _Edges, score_GK: Tensor, given_G1: Tensor, value_GQ: Tensor
) -> Tensor:
    """Return the value of each edge at a position, float32 ``[G, E]``."""
    is_given_G1, class_GE = given_G1 != OPEN, edges.class_GE
    gain_GE = score_GK.gather(1, class_GE).masked_fill(edges.ends_GE | is_given_G1, 0.0)
    differs_GE = is_given_G1 & (class_GE != given_G1)
    # Padding leads from END by class 0.
    gain_GE = gain_GE.masked_fill(differs_GE | (class_GE == 0), NEVER)
    return value_GQ.gather(1, edges.source_GE) + gain_GE


def backtrack(
    tables: Tables, canvases: Canvases, score_GCK: Tensor, value_GCQ: Tensor
) -> Path:
    """Return the best text of each canvas that leaves room for what it lacks, or a sampled one."""
    edges = _edges(tables, canvases.which_G)
    fits_GQ = tables.far_AQ[canvases.which_G] <= canvases.room_G[:, None]
    last_GQ = value_GCQ[:, -1].masked_fill(~fits_GQ, NEVER)
    # Drawn by the position in front, for how many columns there are depends on the batch.
    temperature_G = canvases.temperature_G
    step_G = canvases.step_G
    counters = canvases.seed_G ^ LAST, canvases.position_G, step_G
    state_G = _choose(last_GQ, temperature_G, counters)
    length = _text_length(canvases)
    num_outside = score_GCK.shape[1] - length
    classes = [torch.full_like(state_G, OUTSIDE)] * num_outside
    states = [state_G] * (num_outside + 1)
    for place in range(length - 1, -1, -1):
        given_G1 = canvases.given_GC[:, place, None]
        total_GE = _totals(edges, score_GCK[:, place], given_G1, value_GCQ[:, place])
        total_GE = total_GE.masked_fill(edges.target_GE != state_G[:, None], NEVER)
        counters = canvases.seed_G ^ EDGE, canvases.position_G + place, step_G
        edge_G1 = _choose(total_GE, temperature_G, counters)[:, None]
        is_outside_G = given_G1.squeeze(1) == OUTSIDE
        class_G = edges.class_GE.gather(1, edge_G1).squeeze(1)
        source_G = edges.source_GE.gather(1, edge_G1).squeeze(1)
        state_G = torch.where(is_outside_G, state_G, source_G)
        classes.append(class_G.masked_fill(is_outside_G, OUTSIDE))
        states.append(state_G)
    return Path(torch.stack(classes[::-1], dim=1), torch.stack(states[::-1], dim=1))


def _choose(
    score_TN: Tensor, temperature_T: Tensor, counters: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the first of the best, or one sampled in proportion to ``exp(score)``, int64 ``[T]``.

    Args:
        counters: seed, position and step of the random numbers, int64 ``[T]`` each.
    """
    best_T = score_TN.argmax(dim=1)
    sampled = (temperature_T > 0).nonzero().squeeze(1)
    if not len(sampled):
        return best_T
    seed_T, position_T, step_T = (counter[sampled] for counter in counters)
    uniform_TN = gumbel_uniform(seed_T, position_T, step_T, score_TN.shape[1])
    noisy_TN = score_TN[sampled].to(torch.float64) - (-uniform_TN.log()).log()
    return best_T.index_copy(0, sampled, noisy_TN.argmax(dim=1))
