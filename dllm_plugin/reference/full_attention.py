"""Decode one request under full attention, as LLaDA, Dream and Fast-dLLM do."""

import torch
from torch import Tensor

from dllm_plugin.reference.full_text import CACHED, FullText, Pass
from dllm_plugin.reference.numbers import (
    ALG_TEMP_ORDER,
    ORIGIN_ORDER,
    RANDOM_ORDER,
    counter_uniform,
    counter_uniforms,
    dream_quota,
    factor_count,
    llada_quota,
    ranking,
)


def decode(text: FullText) -> FullText:
    """Decode all canvases of a text, ending as soon as the answer is known."""
    while text.final() is None:
        for low, high in text.open_canvas():
            _denoise(text, low, high)
            if text.final() is not None:
                break
    return text


def _denoise(text: FullText, low: int, high: int) -> None:
    """Decode one block, to its end or the end of the answer."""
    step, end, size = 0, text.end_of(high), len(text.masked(low, high))
    refreshed_from = text.refreshed_from(low)
    windows = {
        "semi_autoregressive": (0, end),
        "prefix_cache": (low, end),
        "dual_cache": (low, high),
    }
    while (left := text.masked(low, high)) and text.final() is None:
        first, last = windows[text.rules.strategy] if step else (refreshed_from, end)
        logits = text.forward(first, last, left)
        tokens, confidence, score = _propose(text, logits, left, step)
        # Later steps compute no row that predicts the first position.
        by_itself = (
            text.model.shift and left[0] == low and text.rules.strategy in CACHED
        )
        first_only = by_itself and step == 0
        take = [0] if first_only else _choose(text, left, size, step, confidence, score)
        for k in take:
            text.tokens[left[k]] = text.written[left[k]] = tokens[k]
            text.raw[left[k]] = logits[k]
        new = [[left[k], tokens[k]] for k in sorted(take)]
        text.passes.append(Pass(first, last - first, end, left, new))
        text.tell({p: logits[k] for k, p in enumerate(left)}, left)
        step += 1


def _propose(
    text: FullText, logits: Tensor, left: list[int], step: int
) -> tuple[list[int], Tensor, Tensor]:
    """Return token, confidence and ranking score for each masked position."""
    rules, banned = text.rules, logits.clone()
    banned[:, text.model.mask_id] = float("-inf")
    if rules.logits_eos_inf:
        banned[:, rules.eos] = float("-inf")
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
        banned[:, [rules.eot] if rules.temperature > 0 else [rules.eos, rules.eot]] = (
            float("-inf")
        )
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
    draw = text.uniform or (
        lambda position, step: counter_uniform(seed, position, step)
    )
    return torch.tensor([draw(p, step) for p in positions])


def _noise(text: FullText, size: int, left: list[int], step: int) -> Tensor:
    """Return the Gumbel noise of each position, for every token."""
    seed = text.rules.seed
    draw = text.noise or (
        lambda position, step: counter_uniforms(seed, position, step, size)
    )
    uniform = torch.stack([draw(position, step) for position in left])
    return -(-uniform.log()).log()


def _filter(text: FullText, logits: Tensor) -> Tensor:
    """Apply Dream's nucleus and top-k, which it applies at temperature 0 too."""
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
    """Return which of the masked positions take their token, as indices into `left`."""
    rules, shift = text.rules, text.model.shift
    if rules.policy == "origin":
        return _transfers(text, left, step)
    ranked = sorted(range(len(left)), key=lambda k: (-float(score[k]), left[k]))
    values, steps = [float(score[k]) for k in ranked], text.steps
    releases = shift and rules.strategy not in CACHED
    if rules.policy == "threshold":
        allowed = (
            _released(size, steps, step) - (size - len(left)) if releases else len(left)
        )
        limit = float(torch.tensor(rules.threshold))
        text.close_choice(*(value - limit for value in values[1:allowed]))
        count = min(allowed, max(1, sum(value >= limit for value in values)))
    elif rules.policy == "factor":
        count = factor_count(values, rules.factor)
        text.close_choice(
            *(values[j] - (1 - rules.factor / (j + 2)) for j in range(1, len(values)))
        )
    elif shift:
        count = dream_quota(len(left), steps, step, rules.eps)
    else:
        count = llada_quota(size, steps, step)
    if step >= steps - 1 and not (releases and rules.policy == "threshold"):
        return ranked
    if 0 < count < len(left):
        text.close_choice(values[count - 1] - values[count])
    return ranked[:count]


def _released(size: int, steps: int, step: int) -> int:
    """Count the positions that the steps so far have offered, in Dream's own loop by threshold."""
    if step >= steps - 1:
        return size
    return size // steps * (step + 1) + min(step + 1, size % steps)


def _transfers(text: FullText, left: list[int], step: int) -> list[int]:
    """Choose as Dream's `origin`: each position by itself, at random."""
    if step >= text.steps - 1:
        return list(range(len(left)))
    time = torch.linspace(1, text.rules.eps, text.steps + 1)
    share = float(1 - time[step + 1] / time[step])
    draws = _uniforms(text, ORIGIN_ORDER, left, step).tolist()
    text.close_choice(*(draw - share for draw in draws))
    return [k for k, draw in enumerate(draws) if draw < share]
