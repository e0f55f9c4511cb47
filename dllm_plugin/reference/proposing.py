"""Propose a token for each position, and score the positions."""

from collections import Counter

import torch
from torch import Tensor

from .numbers import ALG_TEMP_ORDER, RANDOM_ORDER, counter_uniform, counter_uniforms
from .rules import CAUSAL_BLOCKS, EXACT_BLOCKS, FULL_ATTENTION, STRUCTURE
from .text import FILL, Proposal, Text

Proposals = dict[int, Proposal]
UNTEMPERED = (*FULL_ATTENTION, EXACT_BLOCKS, CAUSAL_BLOCKS, STRUCTURE)


def propose(
    text: Text, logits: Tensor, positions: list[int], step: int, edits: bool = False
) -> Proposals:
    """Propose a token for positions by their logits ``[N, V]``.

    `step` selects the random numbers. Loops of LLaDA and Stable-DiffCoder read
    confidences before temperature, all other loops after temperature and filters; all
    read them after penalties. `edits` are greedy, and nothing is penalised.
    """
    if not positions:
        return {}
    rules, raw = text.rules, logits
    logits = _without(logits, [text.model.mask_id])
    if not edits:
        logits = _penalise(text, logits)
    if rules.logits_eos_inf:
        logits = _without(logits, [rules.eos])
    is_tempered = text.model.shift or rules.strategy not in UNTEMPERED
    noisy = logits
    if is_tempered:
        temperature = rules.temperature or rules.entropy_temperature
        logits = _filter(text, logits / temperature)
        noisy = logits.log_softmax(-1)
    if rules.temperature > 0 and not edits:
        # The logarithm of exp(logits) / (-ln U) ** temperature.
        power = 1.0 if is_tempered else rules.temperature
        noisy = noisy.double() + power * _noise(text, noisy, positions, step)
    best = noisy.topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    tokens = noisy.argmax(-1)
    if rules.confidence_eos_eot_inf:
        # LLaDA's loop bans EOS in the logits with noise, which are others.
        greedy = [] if rules.temperature > 0 else [rules.eos]
        logits = _without(logits, [*greedy, rules.eot])
    probs = logits.softmax(-1)
    confidence = probs.gather(1, tokens[:, None]).squeeze(1)
    score = _score(text, probs, confidence, positions, step)
    columns = (tokens.tolist(), confidence.tolist(), score.tolist(), gaps, raw)
    rows = zip(*columns, strict=True)
    return {p: Proposal(*row) for p, row in zip(positions, rows, strict=True)}


def best_first(positions: list[int], found: Proposals) -> list[int]:
    """Sort positions by falling score, equal scores from left to right."""
    return sorted(positions, key=lambda p: (-found[p].score, p))


def uniforms(text: Text, order: int, positions: list[int], step: int) -> Tensor:
    """Return a uniform number of each position; `order` selects the stream."""
    if text.uniform is not None:
        numbers = [text.uniform(p, step) for p in positions]
    else:
        seed = text.rules.seed ^ order
        numbers = [counter_uniform(seed, p, step) for p in positions]
    return torch.tensor(numbers)


def _without(logits: Tensor, tokens: list[int]) -> Tensor:
    """Return logits in which tokens have no probability."""
    logits = logits.clone()
    logits[:, tokens] = float("-inf")
    return logits


def _penalise(text: Text, logits: Tensor) -> Tensor:
    """Return logits in which tokens that the text has already are less likely.

    A template is part of the prompt here. Positions decided so far count, however far
    to the right; a token there counts as often as it stands there.
    """
    rules, start = text.rules, len(text.prompt)
    penalties = (rules.presence_penalty, rules.frequency_penalty)
    if rules.repetition_penalty == 1.0 and penalties == (0.0, 0.0):
        return logits
    given = dict(enumerate(text.template or [], start))
    known, counts = set(text.prompt), Counter[int]()
    for position, token in enumerate(text.tokens[start:], start):
        if given.get(position, FILL) != FILL:
            known.add(token)
        elif token != text.model.mask_id:
            counts[token] += 1
    logits = logits.clone()
    for token in known | set(counts):
        scale = rules.repetition_penalty
        column = logits[:, token]
        logits[:, token] = torch.where(column > 0, column / scale, column * scale)
    for token, count in counts.items():
        presence, frequency = penalties
        logits[:, token] -= presence + frequency * count
    return logits


def _noise(text: Text, logits: Tensor, positions: list[int], step: int) -> Tensor:
    """Return Gumbel noise float64 ``[N, V]``."""
    rows = []
    for position in positions:
        if text.noise is not None:
            rows.append(text.noise(position, step))
        else:
            size = logits.shape[1]
            rows.append(counter_uniforms(text.rules.seed, position, step, size))
    uniform = torch.stack(rows).to(logits.device)
    return -(-uniform.log()).log()


def _filter(text: Text, logits: Tensor) -> Tensor:
    """Filter by top-p and then by top-k, as Dream does at temperature 0 too."""
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


def _score(
    text: Text, probs: Tensor, confidence: Tensor, positions: list[int], step: int
) -> Tensor:
    """Return the number by which each position is ranked; larger is more certain."""
    policy, score = text.rules.policy, confidence
    if policy == "entropy":
        score = (probs * (probs + 1e-10).log()).sum(-1)
    elif policy == "topk_margin":
        best = probs.topk(2).values
        score = best[:, 0] - best[:, 1]
    elif policy == "random":
        score = uniforms(text, RANDOM_ORDER, positions, step)
    elif policy == "sequential":
        score = -torch.tensor(positions, dtype=torch.float64)
    if text.rules.alg_temp:
        uniform = uniforms(text, ALG_TEMP_ORDER, positions, step)
        noise = -(-uniform.log()).log()
        score = score / text.rules.alg_temp + noise.to(score.device)
    return score
