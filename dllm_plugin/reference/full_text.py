"""Hold a text that is decoded under full attention.

Keys and values lie in slots by position, as in the references: every query writes its own slot
and then sees all slots of the canvas. A canvas that is done is the prompt of the next one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor

from dllm_plugin.reference.model import Forward, Slots
from dllm_plugin.reference.numbers import final_answer
from dllm_plugin.reference.watch import Watched

FILL = -1
CACHED = ("prefix_cache", "dual_cache")


@dataclass(frozen=True)
class Rules:
    """Say what an engine or a request sets; names as in ``dllm_NAME``.

    `eos` and `eot` are what the two options about them ban.
    """

    strategy: str = "semi_autoregressive"
    policy: str = "low_confidence"
    block_length: int | None = None  # None: the whole canvas
    steps: int | None = None  # per block; None: its length
    threshold: float = 0.9
    factor: float = 1.0
    eps: float = 1e-3
    alg_temp: float = 0.0
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    top_p: float = 1.0
    top_k: int = 0
    temperature: float = 0.0
    seed: int = 0
    eos: int = -1
    eot: int = -1
    full_refresh_every: int = 1
    refresh_before: int | None = None  # None: from the start of the answer
    suffix_window: int | None = None  # None: the whole canvas


@dataclass(frozen=True)
class Pass:
    """Hold one forward: queries [q_start, q_start + q_len), slots [0, kv_len).

    rows: positions that were masked in the block before it; new: [position, token] written.
    """

    q_start: int
    q_len: int
    kv_len: int
    rows: list[int]
    new: list[list[int]]


@dataclass
class FullText(Watched):
    """Hold a text being decoded and the passes it took.

    template         what stands behind the prompt, with FILL for a position to fill; its answer
                     ends with its last gap
    lost             lengths of the answer at which the cache was lost before the next block
    uniform, noise   random numbers of (position, step in the block), unless recorded ones
    raw              per position: raw logits of the row that predicted it when it was unmasked
    """

    model: Forward
    prompt: list[int]
    max_tokens: int
    rules: Rules = field(default_factory=Rules)
    canvas_length: int = 10**9
    stop: Collection[int] = ()
    max_model_len: int = 10**9
    lost: Collection[int] = ()
    template: list[int] | None = None
    uniform: Callable[[int, int], float] | None = None
    noise: Callable[[int, int], Tensor] | None = None
    tokens: list[int] = field(init=False)
    passes: list[Pass] = field(default_factory=list)
    raw: dict[int, Tensor] = field(default_factory=dict)
    slots: Slots = field(default_factory=dict)
    block_length: int = field(init=False)
    steps: int = field(init=False)
    canvas_start: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.block_length = self.rules.block_length or min(
            self.max_tokens, self.canvas_length
        )
        self.max_tokens = min(self.max_tokens, self.max_model_len - len(self.prompt))
        # Dream's own loop by threshold releases so many positions a step; one step: all at once.
        at_once = self.rules.policy == "threshold" and self.rules.strategy not in CACHED
        default = 1 if self.model.shift and at_once else self.block_length
        self.steps = self.rules.steps or default

    def final(self) -> list[int] | None:
        """Return the answer, once a leading run of decided tokens holds all of it."""
        decided = self.tokens[len(self.prompt) :]
        return final_answer(decided, self.model.mask_id, self.stop, self.max_tokens)

    def answer(self) -> list[int]:
        """Return the answer of a finished text."""
        answer = self.final()
        assert answer is not None
        return answer

    def computed(self) -> int:
        """Count the positions that all forwards computed; guided ones count twice."""
        rows = 2 if self.rules.cfg_scale > 0 else 1
        return rows * sum(one.q_len for one in self.passes)

    def masked(self, low: int, high: int) -> list[int]:
        """Return the undecided positions of a block."""
        return [p for p in range(low, high) if self.tokens[p] == self.model.mask_id]

    def open_canvas(self) -> list[tuple[int, int]]:
        """Append the masks of a canvas; return its blocks."""
        start, length = len(self.tokens), self.block_length
        if self.template is not None:
            mask_id, end = self.model.mask_id, start + self.max_tokens
            self.tokens += [
                mask_id if token == FILL else token for token in self.template
            ]
            self.canvas_start = start
            return [(low, min(low + length, end)) for low in range(start, end, length)]
        left = self.max_tokens - (start - len(self.prompt))
        blocks = min(-(-left // length), max(self.canvas_length // length, 1))
        end = min(start + blocks * length, self.max_model_len)
        self.tokens += [self.model.mask_id] * (end - start)
        self.canvas_start = start
        return [(low, min(low + length, end)) for low in range(start, end, length)]

    def end_of(self, high: int) -> int:
        """Return the end of what exists while the block that ends at `high` is decoded."""
        window = self.rules.suffix_window
        return (
            len(self.tokens) if window is None else min(high + window, len(self.tokens))
        )

    def refreshed_from(self, low: int) -> int:
        """Return where the refresh starts that the block at `low` begins with."""
        decided = low - len(self.prompt)
        if decided in self.lost:
            self.slots = {}
            return 0
        if decided // self.block_length % self.rules.full_refresh_every == 0:
            return 0
        before = self.rules.refresh_before
        return len(self.prompt) if before is None else max(0, low - before)

    def forward(self, first: int, last: int, rows: list[int]) -> Tensor:
        """Compute logits of rows that predict `rows`, by a pass over the queries [first, last)."""
        logits = self.model.rows_at(first, self.tokens[first:last], self.slots)
        scale, start = self.rules.cfg_scale, self.canvas_start
        if scale > 0:
            blank = [self.model.mask_id] * start + self.tokens[start:]
            without = self.model.rows_at(0, blank, {})
            logits = without + (scale + 1) * (logits - without)
        return logits[[p - first - self.model.shift for p in rows]]
