"""Propose a token, a confidence and a rank score for every canvas position.

A step whose requests want no more than temperature, bans and biases reads the logits once, in
their own type (:mod:`dllm_plugin.kernels.confidence`). Filters, bad words, log-probabilities and
LLaDA's EOS options need float32 copies, a few rows at a time. Which way a step takes is read from
host mirrors. Shape letters as in :mod:`dllm_plugin.decoding.plan`.
"""

import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig

from dllm_plugin.decoding.plan import Proposal
from dllm_plugin.decoding.policies import RANKED_BY
from dllm_plugin.kernels.confidence import kernel as row_stats
from dllm_plugin.kernels.confidence import partial_reference as part_reference
from dllm_plugin.kernels.confidence import reference
from dllm_plugin.kernels.confidence.random_numbers import counter_uniform, drawn_order
from dllm_plugin.kernels.confidence.reference import Draws, RowStats
from dllm_plugin.sampling.logits_rows import RowChunk, at_rows, split
from dllm_plugin.sampling.logprobs import LogprobStash
from dllm_plugin.sampling.token_rules import NEGATIVE_INFINITY, TokenRules
from dllm_plugin.sampling.vocab_parallel import VocabShard
from dllm_plugin.state.canvas_states import POLICY_IDS, CanvasStates

# Separate the streams of random numbers of a request: what is not xor-ed draws tokens.
RANDOM_ORDER = 0x5D2F
ORIGIN_ORDER = 0x0B16
ALG_TEMP_ORDER = 0xA16
TopFilter = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
NO_MASK = -1  # the mask id of rows that are under the rules already


class Proposer:
    """Proposes from logits rows by the sampling parameters of their requests."""

    def __init__(
        self,
        states: CanvasStates,
        sampling_states: Any,
        rules: TokenRules,
        logprobs: LogprobStash,
        model_config: ModelConfig,
        keep_top: TopFilter,
        shard: VocabShard | None = None,
    ) -> None:
        """`keep_top`: vLLM's filter of logits by top-k, then top-p."""
        self.states = states
        self.sampling = sampling_states
        self.keep_top = keep_top
        self.rules = rules
        self.logprobs = logprobs
        eos = getattr(model_config.hf_config, "eos_token_id", None)
        ids = eos if isinstance(eos, list) else [eos]
        self.eos_ids = [i for i in ids if i is not None]
        self.turn_end_ids = list(states.config.turn_end_token_ids)
        self.temper = states.config.method.tempered
        self.on_cpu = states.device.type == "cpu"
        self.propose_rows = (reference if self.on_cpu else row_stats).propose_rows
        self.shard = shard
        by_parts = part_reference if self.on_cpu else row_stats
        self.scan_rows, self.merge_rows = by_parts.scan_rows, by_parts.merge_rows

    def propose(
        self, chunks: list[RowChunk], slots_np: np.ndarray, num_rows: int, want_rank: bool = False
    ) -> RowStats:
        """Token and confidence of all rows of a step; `num_rows`, also of those in no chunk."""
        draws = bool(self.sampling.temperature.np[slots_np].any())
        copies, whole = self._needs_copies(slots_np, draws), len(chunks)
        if copies or self.on_cpu:
            chunks = [part for chunk in chunks for part in split(chunk)]
        one = self._from_copies if copies else self._from_logits
        if len(chunks) == 1 and not self.on_cpu:
            return one(chunks[0], slots_np, draws, want_rank, num_rows)
        stats = [one(chunk, slots_np, draws, want_rank, None) for chunk in chunks]
        parts = [part for part in zip(*stats, strict=True) if part[0] is not None]
        if len(chunks) == whole and not self.on_cpu:
            return RowStats(*map(torch.cat, parts))  # whole chunks, in the order of their rows
        rows = [chunk.rows_T for chunk in chunks]
        return RowStats(*(at_rows(part, rows, num_rows) for part in parts))

    def warm_up(self, logits_TV: Tensor, with_carry: bool) -> None:
        """Compile the kernels for all that a step without copies may ask for."""
        rows_T = torch.arange(min(2, len(logits_TV)), device=logits_TV.device)
        slot_T, offset_T = torch.zeros_like(rows_T), rows_T.to(torch.int32)
        shift = int(self.states.config.family.logits_shift)
        bias = torch.zeros(1, self.rules.vocab_size, device=rows_T.device), slot_T
        sources = ((None, shift), (rows_T, 0)) if with_carry else ((None, shift),)
        for (source_T, added), want_rank in itertools.product(sources, (False, True)):
            chunk = RowChunk(rows_T, logits_TV, source_T, slot_T, offset_T, added)
            for draws, biases in itertools.product((None, self._draws(chunk)), (None, bias)):
                self._pass_over(chunk, draws, biases, want_rank, None)

    def _needs_copies(self, slots_np: np.ndarray, draws: bool) -> bool:
        sampling, states = self.sampling, self.states
        filters = draws and (
            sampling.min_p.np[slots_np].any()
            or (sampling.top_k.np[slots_np] != sampling.vocab_size).any()
            or (sampling.top_p.np[slots_np] != 1.0).any()
        )
        options = ("top_k", "top_p", "logits_eos_inf", "confidence_eos_eot_inf")
        wanted = any(states.uses(name, slots_np) for name in options)
        # The ids that `min_tokens` holds back may be in another rank's columns.
        wanted |= self.shard is not None and self.rules.holds_back(slots_np)
        return bool(filters or wanted or self.logprobs.active or self.rules.bad_words.active)

    def _from_logits(
        self,
        chunk: RowChunk,
        slots_np: np.ndarray,
        draws: bool,
        want_rank: bool,
        num_rows: int | None,
    ) -> RowStats:
        """Read the rows where they are; ids that `min_tokens` holds back are banned in place."""
        if self.rules.holds_back(slots_np):
            position_T = self._position(chunk)
            self.rules.hold_back(chunk.logits_XV, chunk.source_T, chunk.slot_T, position_T)
        noise, bias = self._draws(chunk) if draws else None, self.rules.biases(slots_np)
        return self._pass_over(chunk, noise, bias, want_rank, num_rows)

    def _pass_over(
        self,
        chunk: RowChunk,
        draws: Draws | None,
        bias: tuple[Tensor, Tensor] | None,
        want_rank: bool,
        num_rows: int | None,
    ) -> RowStats:
        """One pass over the columns that are here; ranks exchange what each has found."""
        arguments = (chunk.logits_XV, chunk.slot_T, self.states.config.mask_token_id, draws)
        how: dict[str, Any] = {"temper": self.temper, "want_rank": want_rank}
        how |= {"bias": bias, "source_T": chunk.source_T}
        if self.shard is None:
            return self.propose_rows(*arguments, num_rows=num_rows, **how)
        parts_KTP = self.scan_rows(*arguments, columns=self.shard.columns, **how)
        return self.merge_rows(self.shard.exchange(parts_KTP), want_rank, num_rows)

    def _from_copies(
        self,
        chunk: RowChunk,
        slots_np: np.ndarray,
        draws: bool,
        want_rank: bool,
        num_rows: int | None,
    ) -> RowStats:
        """Order: banned and biased ids, temperature, min_p, top-k and top-p, draw, softmax."""
        raw_TV, slot_T = chunk.logits_XV, chunk.slot_T
        if chunk.source_T is not None:
            raw_TV = raw_TV[chunk.source_T]
        if self.shard is not None:
            raw_TV = self.shard.whole(raw_TV)
        logits_TV = raw_TV.to(torch.float32, copy=True)
        self.rules.apply(logits_TV, chunk.rows_T, slot_T, self._position(chunk), slots_np)
        self._ban(logits_TV, "logits_eos_inf", slot_T, slots_np, self.eos_ids)
        tempered_TV = logits_TV
        if draws:
            temperature_T = self.sampling.temperature.gpu[slot_T]
            tempered_TV = logits_TV / temperature_T.where(temperature_T > 0, 1.0)[:, None]
            tempered_TV = self._filter(tempered_TV, slot_T, slots_np)
        tempered_TV = self._filter_greedy(tempered_TV, slot_T, slots_np)
        stats = self.propose_rows(
            tempered_TV,
            slot_T,
            NO_MASK,
            self._draws(chunk) if draws else None,
            divide=False,
            temper=False,
            want_rank=want_rank,
            num_rows=num_rows,
        )
        if not self.temper:
            stats = self._unfiltered(logits_TV, stats, slot_T, slots_np, want_rank, num_rows)
        self.logprobs.score(raw_TV, stats.token_T[: len(slot_T)], chunk.rows_T)
        return stats

    def _unfiltered(
        self,
        logits_TV: Tensor,
        stats: RowStats,
        slot_T: Tensor,
        slots_np: np.ndarray,
        want_rank: bool,
        num_rows: int | None,
    ) -> RowStats:
        """The same tokens with their confidence under LLaDA's rules."""
        name = "confidence_eos_eot_inf"
        self._ban(logits_TV, name, slot_T, slots_np, self.turn_end_ids)
        # In the reference EOS is lost to the noised copy, which is the same one only then.
        greedy_T = self.sampling.temperature.gpu[slot_T] == 0
        self._ban(logits_TV, name, slot_T, slots_np, self.eos_ids, greedy_T)
        token_T = stats.token_T[: len(slot_T)]
        return self.propose_rows(
            logits_TV, slot_T, NO_MASK, want_rank=want_rank, token_T=token_T, num_rows=num_rows
        )

    def _position(self, chunk: RowChunk) -> Tensor:
        return self.states.start_N[chunk.slot_T] + chunk.offset_T + chunk.shift

    def _draws(self, chunk: RowChunk) -> Draws:
        sampling, states = self.sampling, self.states
        tables = (sampling.temperature.gpu, sampling.seeds.gpu, states.counter_N, states.start_N)
        return Draws(*tables, chunk.offset_T, chunk.shift)

    def _ban(
        self,
        logits_TV: Tensor,
        option: str,
        slot_T: Tensor,
        slots_np: np.ndarray,
        ids: list[int],
        among_T: Tensor | None = None,
    ) -> None:
        """Ban ids in the rows whose requests have set an option."""
        if not self.states.uses(option, slots_np):
            return
        rows_T = self.states.number(option, slot_T) > 0
        if among_T is not None:
            rows_T &= among_T
        for i in ids:
            logits_TV[:, i].masked_fill_(rows_T, NEGATIVE_INFINITY)

    def score(
        self,
        stats: RowStats,
        slots_R: Tensor,
        source_RC: Tensor,
        policies: Collection[str],
        draws_order: bool,
    ) -> Proposal:
        """Rows -> canvas positions, each with the score that its request's policy ranks by.

        Args:
            policies: names of those that any of the requests may have.
            draws_order: whether any of them may have set `alg_temp`.
        """
        states = self.states
        policy_R1, raw_RC = states.policy.gpu[slots_R][:, None], stats.confidence_T[source_RC]
        position_C = torch.arange(source_RC.shape[1], device=source_RC.device)
        ranked_by = {RANKED_BY[name] for name in policies}
        scores: dict[str, Tensor] = {}
        if stats.entropy_T is not None and stats.margin_T is not None:
            scores["entropy"] = stats.entropy_T[source_RC]
            scores["margin"] = stats.margin_T[source_RC]
        if "position" in ranked_by:
            scores["position"] = -position_C.to(torch.float32)
        for ranking, stream in (("random", RANDOM_ORDER), ("uniform", ORIGIN_ORDER)):
            if ranking in ranked_by:
                scores[ranking] = self._uniform(slots_R, stream)
        score_RC = raw_RC
        for name in policies:
            if RANKED_BY[name] in scores:
                score = scores[RANKED_BY[name]]
                score_RC = torch.where(policy_R1 == POLICY_IDS[name], score, score_RC)
        if draws_order:
            alg_temp_R1 = states.number("alg_temp", slots_R)[:, None]
            score_RC = drawn_order(score_RC, alg_temp_R1, self._uniform(slots_R, ALG_TEMP_ORDER))
        # A row of NaN or of banned ids alone must not stop the request's progress.
        return Proposal(
            stats.token_T[source_RC], raw_RC.nan_to_num(0.0), score_RC.nan_to_num(-1e30)
        )

    def _uniform(self, slots_R: Tensor, stream: int) -> Tensor:
        """A random number per canvas position, float32 ``[R, C]``."""
        states = self.states
        position_C = torch.arange(states.canvas_NC.shape[1], device=states.device)
        position_RC = states.start_N[slots_R][:, None] + position_C
        seed_R1 = (self.sampling.seeds.gpu[slots_R] ^ stream)[:, None]
        step_R1 = states.counter_N[slots_R].to(torch.int64)[:, None]
        return counter_uniform(seed_R1, position_RC, step_R1)

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
        if self.states.config.method.top_p_first and top_k is not None:
            logits_TV = self.keep_top(logits_TV, None, top_p)
            return self.keep_top(logits_TV, top_k, None)
        return self.keep_top(logits_TV, top_k, top_p)
