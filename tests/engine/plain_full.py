"""Full-attention decoding of one request over :class:`plain.PlainModel` (LLaDA, Dream, Fast-dLLM).

Keys and values lie in slots by position, as in the references: every query writes its own slot
and then sees all slots of the canvas. A canvas that is done is the prompt of the next one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from plain import (
    PlainModel,
    Slots,
    counter_uniform,
    counter_uniforms,
    dream_quota,
    factor_count,
    llada_quota,
)
from plain_loops import RANDOM_ORDER, ranking
from torch import Tensor

EOS, EOT = 257, 312  # of tiny-llada
CACHED = ("prefix_cache", "dual_cache")
# The plugin's streams of random numbers beside RANDOM_ORDER; part of its seeded results.
ORIGIN_ORDER, ALG_TEMP_ORDER = 0x0B16, 0xA16


@dataclass(frozen=True)
class Rules:
    """What an engine or a request sets; names as in ``dllm_NAME``."""

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


@dataclass(frozen=True)
class Pass:
    """One forward: queries [q_start, q_start + q_len), slots [0, kv_len).

    rows: positions that were masked in the block before it; new: [position, token] written.
    """

    q_start: int
    q_len: int
    kv_len: int
    rows: list[int]
    new: list[list[int]]


@dataclass
class FullText:
    """A text being decoded and the passes it took.

    uniform, noise   random numbers of (position, step in the block), unless recorded ones
    margin           how close the closest decision was, in logits or probability
    raw              per position: raw logits of the row that predicted it when it was unmasked
    """

    model: PlainModel
    prompt: list[int]
    max_tokens: int
    rules: Rules = field(default_factory=Rules)
    canvas_length: int = 10**9
    stop: Collection[int] = ()
    max_model_len: int = 10**9
    uniform: Callable[[int, int], float] | None = None
    noise: Callable[[int, int], Tensor] | None = None
    tokens: list[int] = field(init=False)
    passes: list[Pass] = field(default_factory=list)
    raw: dict[int, Tensor] = field(default_factory=dict)
    margin: float = float("inf")
    slots: Slots = field(default_factory=dict)
    block_length: int = field(init=False)
    steps: int = field(init=False)
    canvas_start: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.block_length = self.rules.block_length or min(self.max_tokens, self.canvas_length)
        self.max_tokens = min(self.max_tokens, self.max_model_len - len(self.prompt))
        # Dream's own loop by threshold releases so many positions a step; one step: all at once.
        at_once = self.rules.policy == "threshold" and self.rules.strategy not in CACHED
        default = 1 if self.model.shift and at_once else self.block_length
        self.steps = self.rules.steps or default

    def final(self) -> list[int] | None:
        """The answer, once a leading run of decided tokens holds all of it."""
        answer: list[int] = []
        for token in self.tokens[len(self.prompt) :]:
            if token == self.model.mask_id:
                return None
            answer.append(token)
            if token in self.stop or len(answer) == self.max_tokens:
                return answer
        return None

    def answer(self) -> list[int]:
        """The answer of a finished text."""
        answer = self.final()
        assert answer is not None
        return answer

    def computed(self) -> int:
        """Positions that all passes computed; guided ones count twice."""
        rows = 2 if self.rules.cfg_scale > 0 else 1
        return rows * sum(one.q_len for one in self.passes)

    def masked(self, low: int, high: int) -> list[int]:
        """Undecided positions of a block."""
        return [p for p in range(low, high) if self.tokens[p] == self.model.mask_id]

    def open_canvas(self) -> list[tuple[int, int]]:
        """Append the masks of a canvas; returns its blocks."""
        start, length = len(self.tokens), self.block_length
        left = self.max_tokens - (start - len(self.prompt))
        blocks = min(-(-left // length), max(self.canvas_length // length, 1))
        end = min(start + blocks * length, self.max_model_len)
        self.tokens += [self.model.mask_id] * (end - start)
        self.slots, self.canvas_start = {}, start
        return [(low, min(low + length, end)) for low in range(start, end, length)]

    def forward(self, first: int, last: int, rows: list[int]) -> Tensor:
        """Logits of the rows that predict `rows`, from a pass over the queries [first, last)."""
        logits = self.model.rows_at(first, self.tokens[first:last], self.slots)
        scale, start = self.rules.cfg_scale, self.canvas_start
        if scale > 0:
            blank = [self.model.mask_id] * start + self.tokens[start:]
            without = self.model.rows_at(0, blank, {})
            logits = without + (scale + 1) * (logits - without)
        return logits[[p - first - self.model.shift for p in rows]]

    def close_call(self, *gaps: float) -> None:
        """Note how far a decision was from another one."""
        self.margin = min(self.margin, *(abs(gap) for gap in gaps), self.margin)


def decode(text: FullText) -> FullText:
    """All canvases of a text, ending as soon as the answer is known."""
    while text.final() is None:
        for low, high in text.open_canvas():
            _denoise(text, low, high)
            if text.final() is not None:
                break
    return text


def _denoise(text: FullText, low: int, high: int) -> None:
    """One block, to its end or the end of the answer."""
    step, end, size = 0, len(text.tokens), high - low
    windows = {
        "semi_autoregressive": (0, end),
        "prefix_cache": (low, end),
        "dual_cache": (low, high),
    }
    while (left := text.masked(low, high)) and text.final() is None:
        first, last = windows[text.rules.strategy] if step else (0, end)
        logits = text.forward(first, last, left)
        tokens, confidence, score = _propose(text, logits, left, step)
        take = _choose(text, left, size, step, confidence, score)
        for k in take:
            text.tokens[left[k]] = tokens[k]
            text.raw[left[k]] = logits[k]
        new = [[left[k], tokens[k]] for k in sorted(take)]
        text.passes.append(Pass(first, last - first, end, left, new))
        step += 1


def _propose(
    text: FullText, logits: Tensor, left: list[int], step: int
) -> tuple[list[int], Tensor, Tensor]:
    """Token, confidence and ranking score for each masked position."""
    rules, banned = text.rules, logits.clone()
    banned[:, text.model.mask_id] = float("-inf")
    if rules.logits_eos_inf:
        banned[:, EOS] = float("-inf")
    noisy = banned
    if text.model.shift:
        banned = _filter(text, banned / (rules.temperature or 1.0))
        noisy = banned.log_softmax(-1)
    if rules.temperature > 0:
        # The logarithm of exp(logits) / (-ln U) ** temperature.
        power = 1.0 if text.model.shift else rules.temperature
        noisy = noisy.double() + power * _noise(text, noisy.shape[1], left, step)
    best = noisy.topk(2).values
    text.close_call(*(best[:, 0] - best[:, 1]).tolist())
    tokens = noisy.argmax(-1)
    if rules.confidence_eos_eot_inf:
        banned = banned.clone()
        banned[:, [EOT] if rules.temperature > 0 else [EOS, EOT]] = float("-inf")
    probs = banned.softmax(-1)
    confidence = probs.gather(1, tokens[:, None]).squeeze(1)
    score = confidence
    if rules.policy in ("entropy", "topk_margin"):
        score = ranking(probs, rules.policy)
    if rules.policy == "random":
        score = _uniforms(text, RANDOM_ORDER, left, step)
    if rules.alg_temp > 0:
        uniform = _uniforms(text, ALG_TEMP_ORDER, left, step)
        score = score / rules.alg_temp - (-uniform.log()).log()
    return tokens.tolist(), confidence, score


def _uniforms(text: FullText, stream: int, positions: list[int], step: int) -> Tensor:
    seed = text.rules.seed ^ stream
    draw = text.uniform or (lambda position, step: counter_uniform(seed, position, step))
    return torch.tensor([draw(p, step) for p in positions])


def _noise(text: FullText, size: int, left: list[int], step: int) -> Tensor:
    """The Gumbel noise of each position, for every token."""
    seed = text.rules.seed
    draw = text.noise or (lambda position, step: counter_uniforms(seed, position, step, size))
    uniform = torch.stack([draw(position, step) for position in left])
    return -(-uniform.log()).log()


def _filter(text: FullText, logits: Tensor) -> Tensor:
    """Dream's nucleus and top-k, which it applies at temperature 0 too."""
    rules, least = text.rules, torch.finfo(torch.float32).min
    if rules.top_p < 1:
        values, order = logits.sort(dim=-1, descending=True)
        mass = values.softmax(-1).cumsum(-1)
        text.close_call(*(mass - rules.top_p).abs().amin(-1).tolist())
        dropped = mass > rules.top_p
        dropped = torch.cat([torch.zeros_like(dropped[:, :1]), dropped[:, :-1]], dim=-1)
        logits = logits.masked_fill(dropped.gather(1, order.argsort(-1)), least)
    if rules.top_k:
        best = logits.topk(rules.top_k).values
        logits = logits.masked_fill(logits < best[:, -1:], least)
    return logits


def _choose(
    text: FullText,
    left: list[int],
    size: int,
    step: int,
    confidence: Tensor,
    score: Tensor,
) -> list[int]:
    """Which of the masked positions take their token, as indices into `left`."""
    rules, shift = text.rules, text.model.shift
    if shift and step == 0 and rules.strategy in CACHED:
        return [0]
    if rules.policy == "origin":
        return _transfers(text, left, step)
    ranked = sorted(range(len(left)), key=lambda k: (-float(score[k]), left[k]))
    values, steps = [float(score[k]) for k in ranked], text.steps
    releases = shift and rules.strategy not in CACHED
    if rules.policy == "threshold":
        allowed = _released(size, steps, step) - (size - len(left)) if releases else len(left)
        limit = float(torch.tensor(rules.threshold))
        text.close_call(*(value - limit for value in values[1:allowed]))
        count = min(allowed, max(1, sum(value >= limit for value in values)))
    elif rules.policy == "factor":
        count = factor_count(values, rules.factor)
        text.close_call(*(values[j] - (1 - rules.factor / (j + 2)) for j in range(1, len(values))))
    elif shift:
        count = dream_quota(len(left), steps, step, rules.eps)
    else:
        count = llada_quota(size, steps, step)
    if step >= steps - 1 and not (releases and rules.policy == "threshold"):
        return ranked
    if 0 < count < len(left):
        text.close_call(values[count - 1] - values[count])
    return ranked[:count]


def _released(size: int, steps: int, step: int) -> int:
    """How many positions the steps so far have offered, in Dream's own loop by threshold."""
    if step >= steps - 1:
        return size
    return size // steps * (step + 1) + min(step + 1, size % steps)


def _transfers(text: FullText, left: list[int], step: int) -> list[int]:
    """Dream's `origin`: each position by itself, at random."""
    if step >= text.steps - 1:
        return list(range(len(left)))
    time = torch.linspace(1, text.rules.eps, text.steps + 1)
    share = float(1 - time[step + 1] / time[step])
    draws = _uniforms(text, ORIGIN_ORDER, left, step).tolist()
    text.close_call(*(draw - share for draw in draws))
    return [k for k, draw in enumerate(draws) if draw < share]
