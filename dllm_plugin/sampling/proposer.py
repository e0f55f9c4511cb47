"""Propose a token and its confidence from each logits row.

The logits of a step are read once, in their own type (:mod:`dllm_plugin.kernels.confidence`): no
float32 copy, no softmax and no noise of their size is ever stored. Only for rows of requests that
ask for top-p, top-k, min_p, bad words, log-probabilities or LLaDA's EOS options float32 copies are
made, of 256 rows at a time, and vLLM's memory profile is shown exactly these
(``DiffusionSampler._reserve_peak``). Host mirrors select these rows. Shape letters as in
:mod:`dllm_plugin.decoding.plan`; X rows of a logits tensor.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig

from dllm_plugin.config.request.structured_outputs import no_automata
from dllm_plugin.grammar.step import unpack
from dllm_plugin.kernels.confidence import kernel as row_stats
from dllm_plugin.kernels.confidence import partial_reference, reference
from dllm_plugin.kernels.confidence.reference import Reading, RowSampling, RowStats
from dllm_plugin.state.canvas_states import CanvasStates

from .features.feature import COPIED, ONCE, SCORED, StepFeature
from .features.token_rules import NO_CONFIDENCE, NO_PROPOSAL, EosBans, TokenRules
from .filters import Filters
from .rows import RowChunk, VocabShard, rows_of, scatter_rows, split_rows

NO_MASK = -1  # the mask id of rows in which it is banned already


class Wanted(NamedTuple):
    """Describe how the rows of some requests are read.

    slots_np   the slots of these requests
    scored     whether features score the rows
    want_ranking  whether entropy and margin are wanted
    features   the active features of the step
    """

    slots_np: np.ndarray
    scored: bool
    want_ranking: bool
    features: Sequence[StepFeature]


class Proposer:
    """Propose by the sampling parameters of each row's request.

    reads_np  int64, how the rows of each slot's request are read: ONCE, COPIED or SCORED
    """

    def __init__(
        self,
        states: CanvasStates,
        filters: Filters,
        rules: TokenRules,
        model_config: ModelConfig,
        shard: VocabShard | None = None,
    ) -> None:
        """Choose the implementation."""
        self.states = states
        self.sampling_states = filters.sampling_states
        self.filters = filters
        self.eos_bans = EosBans(states, model_config)
        self.rules = rules
        self.temper = states.config.method.tempered
        self.filters_first = states.config.method.reorders
        self.on_cpu = states.device.type == "cpu"
        self.propose_rows = (reference if self.on_cpu else row_stats).propose_rows
        self.shard = shard
        partials = partial_reference if self.on_cpu else row_stats
        self.scan_rows = partials.scan_rows
        self.merge_rows = partials.merge_rows
        self.reads_np = np.zeros(states.canvas_NC.shape[0], dtype=np.int64)

    def propose(
        self,
        chunks: list[RowChunk],
        slots_np: np.ndarray,
        num_rows: int,
        features: Sequence[StepFeature] = (),
        want_ranking: bool = False,
    ) -> RowStats:
        """Return token and confidence of some rows; `num_rows` also counts missing rows.

        Args:
            features: features that may change copies of rows, and score them.
            want_ranking: also return entropy and margin.
        """
        reads_np = self.reads_np[slots_np]
        whole = not reads_np.any() and not any(map(self._is_cut, chunks))
        if whole and len(chunks) == 1:
            wanted = Wanted(slots_np, False, want_ranking, ())
            return self._from_logits(chunks[0], wanted, num_rows)
        stats: list[RowStats] = []
        rows: list[Tensor] = []
        for reads in np.unique(reads_np).tolist():
            mine_np = reads_np == reads
            mine = slots_np[mine_np]
            wanted = Wanted(mine, reads == SCORED, want_ranking, features)
            for chunk in chunks:
                taken = chunk if mine_np.all() else rows_of(chunk, mine_np)
                # From copies if the request needs them, or if a grammar bans most ids.
                is_copied = reads != ONCE or chunk.allowed_TW is not None
                read = self._from_copies if is_copied else self._from_logits
                pieces = [taken]
                if is_copied or self._is_cut(chunk):
                    most = self.states.config.rows_at_once
                    pieces = list(split_rows(taken, most))
                for piece in pieces:
                    stats.append(read(piece, wanted))
                    rows.append(piece.rows_T)
        columns = [c for c in zip(*stats, strict=True) if c[0] is not None]
        if whole and sum(map(len, rows)) == num_rows:
            # All rows of the step, in their order.
            return RowStats(*map(torch.cat, columns))
        scattered = [scatter_rows(column, rows, num_rows) for column in columns]
        return RowStats(*scattered)

    def _is_cut(self, chunk: RowChunk) -> bool:
        return self.on_cpu or chunk.allowed_TW is not None

    def add_request(self, slot: int, reads: int) -> None:
        """Store how the rows of a slot's request are read, after all else is staged.

        Args:
            reads: how the features of the request read its rows.
        """
        slots_np = np.array([slot])
        copied = self.filters.users(slots_np) | self.eos_bans.users(slots_np)
        if self.shard is not None:
            # The ids that `min_tokens` bans may be in another rank's columns.
            copied |= self.rules.min_tokens_np[slots_np] > 0
        self.reads_np[slot] = max(reads, COPIED if copied.any() else ONCE)

    def is_mixed(self, slots_np: np.ndarray) -> bool:
        """Return whether the rows of these slots are read in more than one way."""
        reads_np = self.reads_np[slots_np]
        return bool((reads_np != reads_np[:1]).any())

    def warm_up(self, logits_TV: Tensor, carry_NV: Tensor | None) -> None:
        """Launch the kernels in all forms that a step may ask for."""
        with_automata = not no_automata(self.states.config)
        rows_T = torch.arange(min(2, len(logits_TV)), device=logits_TV.device)
        slot_T = torch.zeros_like(rows_T)
        bias = torch.zeros(1, self.rules.vocab_size, device=rows_T.device), slot_T
        whole = RowChunk(rows_T, logits_TV, slot_T, rows_T.to(torch.int32))
        sampling = self._row_sampling(whole, None)
        # Whole rows, those of some requests, and carry rows.
        chunks = [whole, whole._replace(source_T=rows_T)]
        if carry_NV is not None:
            chunks.append(whole._replace(logits_XV=carry_NV, source_T=slot_T))
        if with_automata:
            chunks += [chunk._replace(token_T=rows_T) for chunk in chunks[1:]]
        for chunk, want_ranking in itertools.product(chunks, (False, True)):
            for one, biases in itertools.product((None, sampling), (None, bias)):
                self._read_once(chunk, one, biases, want_ranking)
        shape = (len(rows_T), self.rules.vocab_size)
        copies_TV = torch.zeros(shape, device=rows_T.device)
        chosen = with_automata or not self.temper
        tokens = (None, rows_T) if chosen else (None,)
        forms = itertools.product(tokens, (None, sampling), (False, True))
        for token_T, one, want_ranking in forms:
            if token_T is not None and one is not None and not with_automata:
                continue  # the confidence of chosen tokens is read without sampling
            self._read_copies(copies_TV, slot_T, one, token_T, want_ranking)

    def _from_logits(
        self, chunk: RowChunk, wanted: Wanted, num_rows: int | None = None
    ) -> RowStats:
        """Propose from the logits themselves; ids that `min_tokens` bans are banned in place.

        Args:
            num_rows: length of the result, zeros after the rows; None: as many as the rows.
        """
        if self.rules.uses_min_tokens(wanted.slots_np):
            self.rules.ban_early_stops(chunk.logits_XV, chunk.source_T, chunk)
        sampling = self._row_sampling(chunk, wanted.slots_np)
        biases = self.rules.biases(wanted.slots_np)
        return self._read_once(chunk, sampling, biases, wanted.want_ranking, num_rows)

    def greedy(self, chunk: RowChunk, slots_np: np.ndarray) -> RowStats:
        """Return the best token of each row by its biases only, and its confidence."""
        return self._read_once(chunk, None, self.rules.biases(slots_np), False)

    def _read_once(
        self,
        chunk: RowChunk,
        sampling: RowSampling | None,
        bias: tuple[Tensor, Tensor] | None,
        want_ranking: bool,
        num_rows: int | None = None,
    ) -> RowStats:
        """Read the columns that are here once; ranks exchange what each has found."""
        rows = Reading(
            chunk.logits_XV,
            chunk.slot_T,
            self.states.mask_id,
            sampling,
            temper=self.temper,
            want_ranking=want_ranking,
            bias=bias,
            source_T=chunk.source_T,
            token_T=chunk.token_T,
            num_rows=num_rows,
        )
        if self.shard is None:
            return self.propose_rows(rows)
        assert chunk.token_T is None, "automata are refused with shards"
        found_KTP = self.scan_rows(rows, self.shard.columns)
        partials_SKTP = self.shard.gather_partials(found_KTP)
        return self.merge_rows(partials_SKTP, want_ranking, num_rows)

    def _from_copies(self, chunk: RowChunk, wanted: Wanted) -> RowStats:
        """Propose from float32 copies of the rows.

        Order: banned and biased ids, features, the ids that a grammar bans, temperature, min_p,
        top-k and top-p, sampling, softmax, scores.
        """
        raw_TV, slot_T = chunk.logits_XV, chunk.slot_T
        slots_np = wanted.slots_np
        filters = self.filters
        bans = self.eos_bans
        if chunk.source_T is not None:
            raw_TV = raw_TV[chunk.source_T]
        if self.shard is not None:
            raw_TV = self.shard.gather_rows(raw_TV)
        logits_TV = raw_TV.to(torch.float32, copy=True)
        self.rules.apply(logits_TV, chunk, slots_np)
        for feature in wanted.features:
            feature.apply(logits_TV, chunk, slots_np)
        bans.ban(logits_TV, slot_T, slots_np, NO_PROPOSAL, bans.eos_ids)
        if chunk.allowed_TW is not None:
            allowed_TV = unpack(chunk.allowed_TW, logits_TV.shape[1])
            logits_TV.masked_fill_(~allowed_TV, -torch.inf)
        # Filters may do anything with a NaN; that bans leave no id is the request's own doing.
        broken_T = reference.is_broken(logits_TV.amax(dim=-1), raw_TV.amax(dim=-1))
        tempered_TV = logits_TV
        sampling = self._row_sampling(chunk, slots_np)
        if sampling is not None:
            temperature_T = self.sampling_states.temperature.gpu[slot_T]
            divisor_T = temperature_T.where(temperature_T > 0, 1.0)
            if self.filters_first:
                kept_TV = filters.apply(logits_TV.clone(), slot_T, slots_np)
                tempered_TV = kept_TV / divisor_T[:, None]
            else:
                tempered_TV = logits_TV / divisor_T[:, None]
                tempered_TV = filters.apply(tempered_TV, slot_T, slots_np)
        tempered_TV = filters.apply_greedy(tempered_TV, slot_T, slots_np)
        want_ranking = wanted.want_ranking
        token_T = chunk.token_T
        stats = self._read_copies(tempered_TV, slot_T, sampling, token_T, want_ranking)
        if not self.temper:
            # The same tokens with their confidence before temperature and filters (LLaDA).
            is_greedy_T = self.sampling_states.temperature.gpu[slot_T] == 0
            rows = logits_TV, slot_T
            bans.ban(*rows, slots_np, NO_CONFIDENCE, bans.turn_end_ids)
            # EOS only in greedy rows: LLaDA's code bans it in the logits with noise, but reads the
            # confidence from those without. Only at temperature 0 are the two the same tensor.
            bans.ban(*rows, slots_np, NO_CONFIDENCE, bans.eos_ids, is_greedy_T)
            stats = self._read_copies(*rows, None, stats.token_T, want_ranking)
        stats.broken_T.copy_(broken_T)
        if wanted.scored:
            for feature in wanted.features:
                feature.score(raw_TV, stats, chunk)
        return stats

    def _read_copies(
        self,
        tempered_TV: Tensor,
        slot_T: Tensor,
        sampling: RowSampling | None,
        token_T: Tensor | None,
        want_ranking: bool,
    ) -> RowStats:
        """Read copies that are biased, tempered and filtered already."""
        rows = Reading(
            tempered_TV,
            slot_T,
            NO_MASK,
            sampling,
            divide=False,
            temper=False,
            want_ranking=want_ranking,
            token_T=token_T,
        )
        return self.propose_rows(rows)

    def _row_sampling(
        self, chunk: RowChunk, slots_np: np.ndarray | None
    ) -> RowSampling | None:
        """Return the counters of the random numbers that sample the tokens of rows.

        Args:
            slots_np: slots of the requests, whose rows may all be greedy; None samples in any case.
        """
        sampling = self.sampling_states
        if slots_np is not None and not sampling.temperature.np[slots_np].any():
            return None
        return RowSampling(
            sampling.temperature.gpu,
            sampling.seeds.gpu,
            self.states.counter_N,
            self.states.start_N,
            chunk.offset_T,
            chunk.shift,
        )
