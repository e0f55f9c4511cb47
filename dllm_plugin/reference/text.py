"""Store a text while a loop decodes it, its forwards, and how close its decisions were."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from .rules import CACHED, FAR, FULL_ATTENTION, Rules

FILL = -1  # marks a position to fill in a template
Slots = dict[str, tuple[Tensor, Tensor]]  # keys and values of each layer by position


class Model(Protocol):
    """Declare the forwards of a model that the loops call."""

    @property
    def shift(self) -> bool:
        """Return whether row p predicts the token at position p + 1."""

    @property
    def mask_id(self) -> int:
        """Return the id of the mask token."""

    def predictions(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute logits ``[N, V]``; row p predicts the token at position p."""

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> Tensor:
        """Compute logits ``[N, V]`` of tokens from `start` on, which see every slot."""


class Proposal(NamedTuple):
    """Store the proposed token of one position.

    score   number by which positions are ranked, larger first
    gap     distance of the token to the second best token, in logits
    logits  raw logits ``[V]``
    """

    token: int
    confidence: float
    score: float
    gap: float
    logits: Tensor


class Forward(NamedTuple):
    """Store the sizes of one forward and its decisions.

    The forward computes positions [start, start + length), which see positions
    [0, keys). `rows` are the positions that it could decide, `new` those that it
    decided, as [position, token].
    """

    start: int
    length: int
    keys: int
    rows: list[int]
    new: list[list[int]]


class Step(NamedTuple):
    """Store the decisions of one forward for a watcher.

    new      tokens that were written, by position
    rows     logits of the positions that the forward could decide
    closest  smallest distance to another choice of positions, in units of their score
    """

    new: dict[int, int]
    rows: dict[int, Tensor]
    closest: float


class Result(NamedTuple):
    """Store the answer of a text and its number of forwards."""

    tokens: list[int]
    forwards: int


@dataclass
class Text:
    """Store a prompt, the tokens decoded after it, and the forwards that decided them.

    template  tokens after the prompt, with FILL at positions to fill; the answer ends
              with the last of these
    drafter   the model with its draft adapter; None without an adapter
    lost      lengths of the answer at which the cache was lost before the next block
    uniform   recorded random number of (position, step in the block), not the seed's
    noise     recorded random numbers ``[V]`` of (position, step in the block)
    watch     callback after each forward
    tokens    prompt and answer, with the mask token at undecided positions
    starts    first positions of the answer's blocks, and the end of the last block
    raw       raw logits of each position in the forward that decided it
    margin    smallest distance of any decision to another, in logits or probability
    """

    model: Model
    prompt: list[int]
    max_tokens: int
    rules: Rules
    stop: Collection[int] = ()
    max_model_len: int = FAR
    template: list[int] | None = None
    drafter: Model | None = None
    lost: Collection[int] = ()
    uniform: Callable[[int, int], float] | None = None
    noise: Callable[[int, int], Tensor] | None = None
    watch: Callable[[Step], None] | None = None
    tokens: list[int] = field(init=False)
    starts: list[int] = field(init=False)
    block_length: int = field(init=False)
    steps: int = field(init=False)
    raw: dict[int, Tensor] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    margin: float = float("inf")
    closest: float = float("inf")
    written: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        whole = min(self.max_tokens, self.rules.canvas_length)
        self.block_length = self.rules.block_length or whole
        room = self.max_model_len - len(self.prompt)
        self.max_tokens = min(self.max_tokens, room)
        self.steps = self.rules.steps or self._default_steps()
        start, size = len(self.prompt), self.block_length
        low = start - start % size if self.rules.on_grid else start
        blocks = -(-(start + self.max_tokens - low) // size)
        end = min(low + blocks * size, self.max_model_len)
        if self.rules.exact_end:
            end = start + self.max_tokens
        self.starts = [*range(low, end, size), end]

    def _default_steps(self) -> int:
        # Dream's own loop releases positions step by step; by default all at once.
        own_loop = self.rules.strategy in FULL_ATTENTION
        own_loop = own_loop and self.rules.strategy not in CACHED
        if self.model.shift and own_loop and self.rules.policy == "threshold":
            return 1
        return self.block_length

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the answer."""
        return len(self.starts) - 1

    def block_of(self, position: int) -> int:
        """Return the number of a position's block; a prompt without blocks is block 0."""
        if self.rules.on_grid:
            return position // self.block_length
        origin = len(self.prompt)
        if self.rules.splits_prompt:
            origin %= self.block_length
        if position < origin:
            return 0
        return 1 + (position - origin) // self.block_length

    def append_masks(self, end: int) -> None:
        """Append mask tokens up to a position."""
        self.tokens += [self.model.mask_id] * (end - len(self.tokens))

    def masked(self, low: int, high: int) -> list[int]:
        """Return the undecided positions of the answer in [low, high)."""
        span = range(max(low, len(self.prompt)), high)
        return [p for p in span if self.tokens[p] == self.model.mask_id]

    def masked_in(self, index: int) -> list[int]:
        """Return the undecided positions of a block."""
        return self.masked(self.starts[index], self.starts[index + 1])

    def predict(self) -> Tensor:
        """Compute logits ``[N, V]`` of all positions; a block sees earlier blocks."""
        blocks = [self.block_of(p) for p in range(len(self.tokens))]
        return self.model.predictions(self.tokens, blocks)

    def write(self, position: int, proposal: Proposal) -> None:
        """Write the proposed token of a position."""
        self.tokens[position] = self.written[position] = proposal.token
        self.raw[position] = proposal.logits
        self.close_call(proposal.gap)

    def write_all(
        self, positions: Collection[int], proposals: Mapping[int, Proposal]
    ) -> None:
        """Write the proposed tokens of positions."""
        for position in positions:
            self.write(position, proposals[position])

    def close_call(self, *gaps: float) -> None:
        """Record the distances of a decision to others."""
        for gap in gaps:
            self.margin = min(self.margin, abs(gap))

    def close_choice(self, *gaps: float) -> None:
        """Record the distances of a choice of positions to others."""
        self.close_call(*gaps)
        for gap in gaps:
            self.closest = min(self.closest, abs(gap))

    def end_forward(
        self,
        start: int,
        stop: int,
        keys: int,
        rows: Mapping[int, Proposal],
        next_rows: Mapping[int, Proposal] | None = None,
    ) -> None:
        """Record a forward of the positions [start, stop) that could decide `rows`.

        Args:
            next_rows: what a watcher sees of a causal forward, which decides later positions.
        """
        new = [[p, self.written[p]] for p in sorted(self.written)]
        forward = Forward(start, stop - start, keys, list(rows), new)
        self.forwards.append(forward)
        self.show(rows if next_rows is None else next_rows)

    def show(self, rows: Mapping[int, Proposal]) -> None:
        """Call the watcher with the tokens written since the last call."""
        if self.watch is not None:
            logits = {p: proposal.logits for p, proposal in rows.items()}
            self.watch(Step(self.written, logits, self.closest))
        self.written, self.closest = {}, float("inf")

    def final(self, settled: int = FAR) -> list[int] | None:
        """Return the answer if decided tokens before `settled` contain it, else None."""
        answer: list[int] = []
        for token in self.tokens[len(self.prompt) : settled]:
            if token == self.model.mask_id:
                return None
            answer.append(token)
            if token in self.stop or len(answer) == self.max_tokens:
                return answer
        return None

    def answer(self) -> list[int]:
        """Return the answer of a decoded text."""
        answer = self.final()
        assert answer is not None
        return answer

    def result(self) -> Result:
        """Return the answer and the number of forwards of a decoded text."""
        return Result(self.answer(), len(self.forwards))

    def num_positions(self) -> int:
        """Return how many positions all forwards computed; guidance computes twice."""
        rows = 2 if self.rules.cfg_scale > 0 else 1
        return rows * sum(one.length for one in self.forwards)
