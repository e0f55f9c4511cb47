"""Describe a method: how one strategy decodes one model family."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from . import policies
from .acceptance import Drafted
from .full_attention import Bounds, Span
from .plan import AcceptFunction, CommitFunction, PlanFunction

SlotFunction = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
SpanFunction = Callable[[Bounds, np.ndarray], Span]


@dataclass(frozen=True)
class Method:
    """Describe how one strategy decodes one model family.

    plan            what a step computes and may unmask, before the forward
    commit          what of it is final, after the forward
    accept          causal forwards: which drafts stay, and what is predicted; None: none is causal
    policies        rule, ranking and numbers of each policy that has a meaning here
    default_policy  what `auto` becomes; `edited_policy` for checkpoints that were trained to edit
    span            full attention: where the next forward starts and stops; None: at the canvas
    keeps_kv        whether a step may trust the KV of the step before it
    computes_rest   full attention: whether a forward with a cache reaches to the end of the canvas
    logits          the rows of a forward that become logits: every canvas position, or masked ones
    scheduler       "canvas": a canvas in every step; "refresh": forwards of several kinds and
                    sizes; "floating": as many positions of a canvas as load or a request sets;
                    "drafts": as many rows as pay by load and acceptance
    floats          what is decided of a canvas commits in the next step, see `floating`
    least_steps     denoising steps that a block takes at least
    next_block      whether the block after the denoised blocks is computed in their forward
    dedicated_commit  with one active block, a finished block commits in a forward of its own, whose
                    last row predicts the first token of the next block
    verifies        whether a causal forward may drop what was decided: only its own tokens are text
    uses_adapter    whether the bundled model decodes so with its D2F adapter
    untrained       what a checkpoint loses without an adapter, because it was trained with another
                    attention; empty: nothing
    reserves_last   whether the last position of an answer is given: the pad token
    edits           whether decided tokens may be replaced
    inserts         whether edits also delete tokens and insert masks, see `structure`
    rows            causal attention: how many positions a step computes, by the block length
    slots           causal attention: the one block of a step
    drafted         tokens per forward by rows and acceptance; None: drafts have one length
    reorders        rows of a forward are decided positions, then masks; filters are applied before
                    temperature
    exact_end       the last block ends where the text does, and positions after it are not seen
    skips_steps     steps whose quota is 0 are left out, see `quotas.step_with_quota`
    splits_prompt   blocks divide the prompt too, from its end backwards
    hides_pad       its authors' code hides pad tokens from later blocks: none may occur
    whole_canvas    by default a block is as long as the canvas
    blocks_by_default  active blocks; None: what fits the canvas, at least 8
    canvas_by_default  (least positions, least whole blocks)
    tempered        whether a confidence is read after temperature and filters
    top_p_first     filters of greedy requests by top-p before top-k; vLLM filters by top-k first
    reads           options of a request that every policy reads
    refuses         features of vLLM that must be off: full_graphs, chunked_prefill, prefix_caching
    """

    strategy: str
    plan: PlanFunction
    commit: CommitFunction
    policies: policies.Table
    accept: AcceptFunction | None = None
    default_policy: str = "threshold"
    edited_policy: str = "threshold"
    span: SpanFunction | None = None
    keeps_kv: bool = True
    computes_rest: bool = False
    logits: Literal["canvas", "masked"] = "canvas"
    scheduler: Literal["canvas", "refresh", "floating", "drafts"] = "canvas"
    floats: bool = False
    least_steps: int = 1
    next_block: bool = False
    dedicated_commit: bool = False
    verifies: bool = False
    uses_adapter: bool = False
    untrained: str = ""
    reserves_last: bool = False
    edits: bool = False
    inserts: bool = False
    rows: Callable[[int], int] | None = None
    slots: SlotFunction | None = None
    drafted: Drafted | None = None
    reorders: bool = False
    exact_end: bool = False
    skips_steps: bool = False
    splits_prompt: bool = False
    hides_pad: bool = False
    whole_canvas: bool = False
    blocks_by_default: int | None = 1
    canvas_by_default: tuple[int, int] = (0, 0)
    tempered: bool = True
    top_p_first: bool = False
    reads: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()

    @property
    def causal(self) -> bool:
        """Return whether causal forwards store prompts and answers."""
        return self.accept is not None or self.causal_rows

    @property
    def causal_commit(self) -> bool:
        """Return whether only the forwards that store a block are causal."""
        return self.accept is not None and not self.causal_rows

    @property
    def causal_rows(self) -> bool:
        """Return whether every forward is causal by its rows."""
        return self.rows is not None

    @property
    def full_attention(self) -> bool:
        """Return whether every position sees every other, so that KV has to be refreshed."""
        return self.span is not None

    def options_read(self, policy: str) -> frozenset[str]:
        """Return the options that change a request's result under a policy."""
        length = "window" if "window" in self.reads else "block_length"
        return self.reads | self.policies[policy].reads | {"policy", length}

    @property
    def options(self) -> frozenset[str]:
        """Return everything that some policy reads."""
        return frozenset().union(*map(self.options_read, self.policies))
