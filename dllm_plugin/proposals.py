"""Logits rows -> a token, its confidence and its rank score. Two siblings with one signature.

Shape letters as in :mod:`dllm_plugin.plan`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from dllm_plugin.kernels.reference import (
    counter_uniform,
    drawn_order,
    gumbel_uniform,
    row_stats,
)
from dllm_plugin.logprobs import LogprobStash
from dllm_plugin.rows import RowChunk
from dllm_plugin.states import POLICY_IDS, CanvasStates
from dllm_plugin.token_rules import NEGATIVE_INFINITY, TokenRules

# Separate the streams of random numbers of a request: what is not xor-ed draws tokens.
RANDOM_ORDER = 0x5D2F
ORIGIN_ORDER = 0x0B16
ALG_TEMP_ORDER = 0xA16

Stats = tuple[Tensor, Tensor, Tensor]  # token_T, confidence_T, score_T


class Proposer:
    """Proposes from logits rows by the sampling parameters of their requests."""

    def __init__(
        self,
        states: CanvasStates,
        sampling_states: Any,
        rules: TokenRules,
        logprobs: LogprobStash,
        model_config: ModelConfig,
    ) -> None:
        self.states = states
        self.sampling = sampling_states
        self.rules = rules
        self.logprobs = logprobs
        eos = getattr(model_config.hf_config, "eos_token_id", None)
        ids = eos if isinstance(eos, list) else [eos]
        self.eos_ids = [i for i in ids if i is not None]
        self.turn_end_ids = list(states.config.turn_end_token_ids)
        family = states.config.family.name
        by_noise = states.config.full_attention and family == "llada"
        self.propose: Callable[[RowChunk, np.ndarray], Stats] = (
            self.propose_by_noise if by_noise else self.propose_by_draw
        )

    def propose_by_draw(self, chunk: RowChunk, slots_np: np.ndarray) -> Stats:
        """Draw from the tempered, filtered distribution; the confidence is its probability.

        Order: banned and biased ids, temperature, min_p, top-k and top-p, softmax. Dream
        ``sample_tokens`` (top-p before top-k, and at temperature 0 too) and D2F.
        """
        sampling = self.sampling
        logits_TV = self._ruled(chunk, slots_np)
        uniform_T = None
        if sampling.temperature.np[slots_np].any():
            temperature_T = sampling.temperature.gpu[chunk.slot_T]
            draws_T = temperature_T > 0
            logits_TV /= temperature_T.where(draws_T, 1.0)[:, None]
            uniform_T = counter_uniform(*self._counter(chunk))
            uniform_T = uniform_T.where(draws_T, float("nan"))
            logits_TV = self._filter(logits_TV, chunk.slot_T, slots_np)
        logits_TV = self._filter_greedy(logits_TV, chunk.slot_T, slots_np)
        return self._scored(chunk, slots_np, logits_TV, uniform_T)

    def propose_by_noise(self, chunk: RowChunk, slots_np: np.ndarray) -> Stats:
        """Draw by float64 Gumbel noise; the confidence knows neither noise nor temperature.

        LLaDA ``generate.py``, ``add_gumbel_noise``: the largest of ``exp(logits) / (-ln u) ** T``
        is the largest of ``logits / T - ln(-ln u)``. Filters restrict what can be drawn.
        """
        states, sampling = self.states, self.sampling
        logits_TV = self._ruled(chunk, slots_np)
        if states.uses("logits_eos_inf", slots_np):
            off_T = states.number("logits_eos_inf", chunk.slot_T) > 0
            self._ban(logits_TV, off_T, self.eos_ids)
        token_T = logits_TV.argmax(dim=-1)
        temperature_T = sampling.temperature.gpu[chunk.slot_T]
        draws_T = temperature_T > 0
        if sampling.temperature.np[slots_np].any() and len(logits_TV):
            tempered_TV = logits_TV / temperature_T.where(draws_T, 1.0)[:, None]
            tempered_TV = self._filter(tempered_TV, chunk.slot_T, slots_np).to(torch.float64)
            uniform_TV = gumbel_uniform(*self._counter(chunk), logits_TV.shape[1])
            tempered_TV -= (-uniform_TV.log()).log()
            token_T = torch.where(draws_T, tempered_TV.argmax(dim=-1), token_T)
        if states.uses("confidence_eos_eot_inf", slots_np):
            unsure_T = states.number("confidence_eos_eot_inf", chunk.slot_T) > 0
            self._ban(logits_TV, unsure_T, self.turn_end_ids)
            # In the reference EOS is lost to the noised copy, which is the same one only then.
            self._ban(logits_TV, unsure_T & ~draws_T, self.eos_ids)
        return self._scored(chunk, slots_np, logits_TV, None, token_T)

    def _ruled(self, chunk: RowChunk, slots_np: np.ndarray) -> Tensor:
        """A float32 copy of the logits under the requests' token rules."""
        logits_TV = chunk.logits_TV.to(torch.float32, copy=self.logprobs.active)
        self.rules.apply(logits_TV, chunk.rows_T, chunk.slot_T, chunk.position_T, slots_np)
        return logits_TV

    def _counter(self, chunk: RowChunk, stream: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        seed_T = self.sampling.seeds.gpu[chunk.slot_T] ^ stream
        return seed_T, chunk.position_T, self.states.counter_N[chunk.slot_T].to(torch.int64)

    def _ban(self, logits_TV: Tensor, rows_T: Tensor, ids: list[int]) -> None:
        for i in ids:
            column_T = logits_TV[:, i]
            column_T.masked_fill_(rows_T, NEGATIVE_INFINITY)

    def _scored(
        self,
        chunk: RowChunk,
        slots_np: np.ndarray,
        logits_TV: Tensor,
        uniform_T: Tensor | None,
        token_T: Tensor | None = None,
    ) -> Stats:
        states = self.states
        policies = set(states.policy.np[slots_np].tolist())
        stats, entropy_T, margin_T = row_stats(
            logits_TV,
            uniform_T,
            want_entropy=POLICY_IDS["entropy"] in policies,
            want_margin=POLICY_IDS["topk_margin"] in policies,
            token_T=token_T,
        )
        scores = {"entropy": entropy_T, "topk_margin": margin_T}
        if POLICY_IDS["sequential"] in policies:
            scores["sequential"] = -chunk.position_T.to(torch.float32)
        for name, stream in (("random", RANDOM_ORDER), ("origin", ORIGIN_ORDER)):
            if POLICY_IDS[name] in policies:
                scores[name] = counter_uniform(*self._counter(chunk, stream))
        score_T, policy_T = stats.score_T, states.policy.gpu[chunk.slot_T]
        for name, value_T in scores.items():
            if value_T is not None:
                score_T = torch.where(policy_T == POLICY_IDS[name], value_T, score_T)
        if states.uses("alg_temp", slots_np):
            alg_temp_T = states.number("alg_temp", chunk.slot_T)
            uniform_T = counter_uniform(*self._counter(chunk, ALG_TEMP_ORDER))
            score_T = drawn_order(score_T, alg_temp_T, uniform_T)
        self.logprobs.score(chunk.logits_TV, stats.token_T, chunk.rows_T)
        # A row of NaN or of banned ids alone must not stop the request's progress.
        return stats.token_T, stats.confidence_T.nan_to_num(0.0), score_T.nan_to_num(-1e30)

    def _filter(self, logits_TV: Tensor, slot_T: Tensor, slots_np: np.ndarray) -> Tensor:
        sampling = self.sampling
        if not len(logits_TV):
            return logits_TV
        if sampling.min_p.np[slots_np].any():
            floor_T = logits_TV.amax(dim=-1) + sampling.min_p.gpu[slot_T].log()
            logits_TV.masked_fill_(logits_TV < floor_T[:, None], NEGATIVE_INFINITY)
        top_k, top_p = sampling.get_top_k_top_p(slot_T, slots_np)
        return self._top(logits_TV, top_k, top_p)

    def _filter_greedy(self, logits_TV: Tensor, slot_T: Tensor, slots_np: np.ndarray) -> Tensor:
        """Dream's filters of greedy requests: they change the confidence, not the token."""
        states, vocab_size = self.states, logits_TV.shape[1]
        top_k = top_p = None
        if states.uses("top_k", slots_np):
            top_k = states.number("top_k", slot_T).to(torch.int32)
            top_k = top_k.where(top_k > 0, vocab_size).clamp_max(vocab_size)
        if states.uses("top_p", slots_np):
            top_p = states.number("top_p", slot_T)
        return self._top(logits_TV, top_k, top_p)

    def _top(self, logits_TV: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        if not len(logits_TV) or (top_k is None and top_p is None):
            return logits_TV
        config = self.states.config
        if config.full_attention and config.time_schedule and top_k is not None:
            # vLLM filters by top-k first, Dream by top-p.
            logits_TV = apply_top_k_top_p(logits_TV, None, top_p)
            return apply_top_k_top_p(logits_TV, top_k, None)
        return apply_top_k_top_p(logits_TV, top_k, top_p)
