"""Define the struct of a denoising step, what finds its rows, and how it is compiled.

Compiled is the part of a step that is neither the forward nor the read of its logits. Planning a
step and deciding it are some 250 to 300 operations on ``[R, C]`` tensors. With ``compile_step``,
the default on GPUs, torch.compile makes a few kernels of them: each function is one graph that
serves any number of requests, and is compiled at start, from the same code that runs otherwise, for
the configured policy and, if they read the same of a row, `threshold` and `low_confidence`. A graph
of all policies would take three times as long to compile as everything else together, so a step in
which a request asks for another policy runs uncompiled, as does a step with an active feature: see
:mod:`dllm_plugin.sampling.features.ordered`.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; K columns of log-probabilities.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from vllm.sampling_params import SamplingParams

from dllm_plugin.decoding.plan import Canvas, Proposal, StepOutcome, StepPlan
from dllm_plugin.state.canvas_states import CanvasStates

from .rows import RowChunk

BACKEND = "inductor"
# Numbers of a few requests share too little memory for torch to put them into one kernel, which it
# would for one request least of all; there the launches of kernels take longer than the kernels.
# Sizes are compared when code is found, see `Compiled`; not again in each step.
FUSED = {
    "aggressive_fusion": True,
    "score_fusion_memory_threshold": 0,
    "size_asserts": False,
}
# Compiled code is specialised for a length of one; other lengths share the code of the second.
WARMUP_REQUESTS = (1, 3)
# No length of a warm-up tensor may equal another length by chance: torch would take both for one.
WARMUP_ROWS = 11
# What torch may compile of one function in a process: twice for each engine that differs from all
# before it. Its default of eight would refuse the fifth.
COMPILED_AT_MOST = 256
# Lengths for which `Compiled` keeps what it found.
FOUND_AT_MOST = 4096


class Planned(NamedTuple):
    """List the inputs of a step that do not depend on logits; as in :class:`Step`."""

    canvas: Canvas
    plan: StepPlan
    source_RC: Tensor
    remaining_R: Tensor
    drafts_R: Tensor


class StepTensors(NamedTuple):
    """List the tensors that compiled code reads; fields as in :class:`Step`.

    From step to step only values and the number of requests differ, never which fields are None.
    """

    slots_R: Tensor
    canvas: Canvas
    plan: StepPlan
    source_RC: Tensor
    remaining_R: Tensor
    drafts_R: Tensor
    seq_lens_R: Tensor
    refresh_R: Tensor | None


class EmittedLogprobs(NamedTuple):
    """List the log-probabilities that a step emits: the fields of vLLM's LogprobsTensors."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: list[int]


class Emitted(NamedTuple):
    """List what a step emits per request: see vLLM's SamplerOutput.

    tokens_RC   int64, from position 0 on
    emitted_R   int32, how many of them are emitted
    rejected_R  int32, by how much the request's computed positions fall back
    broken_R    int32, positions whose logits were NaN or infinite although a token was wanted.
                Asynchronous full attention packs `left_R` in it: `config/worker_carriers.py`.
    left_R      int32, positions that are still masked in blocks that go on, 0 in others; None if
                nobody counts them
    """

    tokens_RC: Tensor
    emitted_R: Tensor
    rejected_R: Tensor
    broken_R: Tensor
    logprobs: EmittedLogprobs | None
    left_R: Tensor | None = None


@dataclass
class Step:
    """Store one step of the requests that have a canvas in it.

    A field exists after its writer has run. Features may replace fields in their moments.

    Written when rows are planned (`CanvasRows`, `MaskedRows`), on the device:
    slots_R     int64, slot of a request
    canvas, plan  as the strategy sees and plans them
    source_RC   int64, row of each canvas position
    remaining_R int32, tokens that a request may still emit
    drafts_R    int64, canvas positions of a request in this forward
    seq_lens_R  int32, keys of a request after this forward
    refresh_R   int64, start of the refresh after this block; None: no refresh, or at 0
    last_row_R  int64, row of the last position whose KV becomes final; None if that row does not
                predict the first token of the next block
    index_R     int64, place of a request in the batch

    Written at the same time, on the host:
    index_np, slots_np  int64, as index_R and slots_R
    before_np   int, tokens before each canvas at most
    num_reqs    requests of the whole batch
    num_rows    number of values that source_RC can have
    chunks      the logits rows

    Written by features in `start_step`:
    given_RC    bool, positions that templates give; None without templates
    policy_canvas  the canvas by which policies count; None for `canvas`

    Written by the decider:
    proposal    token, confidence and score of each canvas position
    unmask_RC   bool, positions that take their token
    tokens_RC   int64, canvas tokens after the step, before the canvas moves
    saw_stop_R  bool, a stop token was unmasked in this step or before
    emit_RC     int64, canvas position of each emitted token
    outcome     what is committed
    broken_R    int32, see Emitted

    Written by features in `commit`:
    logprobs    what the step emits; None if no request asks
    """

    slots_R: Tensor
    canvas: Canvas
    plan: StepPlan
    source_RC: Tensor
    remaining_R: Tensor
    drafts_R: Tensor
    seq_lens_R: Tensor
    refresh_R: Tensor | None
    last_row_R: Tensor | None = None
    index_R: Tensor = field(init=False)
    index_np: np.ndarray = field(init=False)
    slots_np: np.ndarray = field(init=False)
    before_np: np.ndarray = field(init=False)
    num_reqs: int = field(init=False)
    num_rows: int = field(init=False)
    chunks: list[RowChunk] = field(init=False)
    given_RC: Tensor | None = None
    policy_canvas: Canvas | None = None
    proposal: Proposal = field(init=False)
    unmask_RC: Tensor = field(init=False)
    tokens_RC: Tensor = field(init=False)
    saw_stop_R: Tensor = field(init=False)
    emit_RC: Tensor = field(init=False)
    outcome: StepOutcome = field(init=False)
    broken_R: Tensor = field(init=False)
    logprobs: EmittedLogprobs | None = None

    def tensors(self) -> StepTensors:
        """Return the tensors that compiled code reads."""
        return StepTensors(*[getattr(self, name) for name in StepTensors._fields])

    def new_rows(self, count: int) -> Tensor:
        """Return the numbers of rows that `add_rows` may add, int64."""
        return self.num_rows + torch.arange(count, device=self.slots_R.device)

    def add_rows(
        self, chunk: RowChunk, where: tuple[Tensor, Tensor], row_X: Tensor
    ) -> None:
        """Add a chunk; canvas positions `where` (request, place) read rows `row_X` from now on."""
        self.source_RC = self.source_RC.index_put(where, row_X)
        self.num_rows += len(chunk.rows_T)
        self.chunks = [*self.chunks, chunk]


class LogitsRows:
    """Find the logits rows of a step: the base of the two ways to do so.

    carry_NV  rows of the last forward of a slot that this step reads; None if there are none
    """

    def __init__(self, states: CanvasStates) -> None:
        self.states = states
        self.method = states.config.method
        self.plan = self.method.plan
        self.mask_id = states.config.mask_token_id
        self.num_positions = states.canvas_NC.shape[1]
        self.shift = int(states.config.family.logits_shift)
        self.carry_NV: Tensor | None = None

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Stage a request."""

    def remove_request(self, slot: int) -> None:
        """Free a slot."""

    def warm_up(self, logits_XV: Tensor, carry_NV: Tensor | None) -> None:
        """Launch own kernels in all forms; nothing that a step reads changes."""

    def has_row(self, step: Step) -> Tensor:
        """Return the positions that a row of this step predicts, bool ``[R, C]``."""
        raise NotImplementedError

    def num_columns(self, step: Step) -> int:
        """Return how many leading positions of canvases can have a row, as the host knows."""
        return self.num_positions

    def gather(self, step: Step, row_G: Tensor, slot_G: Tensor) -> Tensor:
        """Return some rows of the step, ``[G, V]``; rows after the logits are carry rows."""
        logits_TV, carry_NV = self.sources(step)
        rows_GV = logits_TV[row_G.clamp_max(len(logits_TV) - 1)]
        if carry_NV is None:
            return rows_GV
        is_carry_G1 = (row_G >= len(logits_TV))[:, None]
        return torch.where(is_carry_G1, carry_NV[slot_G].to(rows_GV.dtype), rows_GV)

    def sources(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Return the logits of canvases, and the carry rows by slot, which count after them."""
        return step.chunks[0].logits_XV, self.carry_NV  # without the rows of prefills

    def replan(self, step: Step, plan: StepPlan) -> None:
        """Replace the plan of a step."""
        step.plan = plan

    def keep_carry_rows(self) -> None:
        """Store the rows of this step that the next steps read."""

    def keep_counts(self, step: Step, left_R: Tensor | None) -> None:
        """Record how many masks the step has left in each block."""


class Compiled:
    """Call a method as one graph; what cannot be a graph raises when it is first called.

    In every call torch compares all that its code was compiled for, which takes the host longer
    than the code itself. In an engine only the lengths of a step's tensors and the context change,
    so torch compares once for the same lengths. After that the code that it found is called.

    compared  torch's own call
    found     this code, by the context and the length of each argument
    """

    def __init__(
        self, method: Any, states: CanvasStates, backend: str = BACKEND
    ) -> None:
        options: dict[str, Any] | None = FUSED if backend == BACKEND else None
        self.compared = torch.compile(
            method, fullgraph=True, backend=backend, options=options
        )
        self.method = method
        self.states = states
        self.found: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return what the method returns; a tuple's first entry tells the length of the others."""
        lengths = [self.states.max_model_len]
        for argument in arguments:
            first = argument if isinstance(argument, Tensor) else argument[0]
            lengths.append(len(first))
        key = tuple(lengths)
        found = self.found.get(key)
        if found is not None:
            return found(*arguments)
        result = self.compared(*arguments)
        if len(self.found) >= FOUND_AT_MOST:
            self.found.clear()
        self.found[key] = self._find(arguments)
        return result

    def forget(self) -> None:
        """Let torch compare again: what was found for made-up steps may not serve true ones."""
        self.found.clear()

    def _find(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the compiled code that serves the arguments; torch's own call if none is left."""
        function, owner = self.method.__func__, self.method.__self__
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        values = dict(zip(names, (owner, *arguments), strict=True))
        for entry in _debug_get_cache_entry_list(code):
            if entry.guard_manager.check(values):
                serves = FunctionType(entry.code, function.__globals__)
                return MethodType(serves, owner)
        return self.compared


def allow_any_length(*values: Any) -> None:
    """Mark all tensors in nested tuples: code compiled with them serves other lengths, too."""
    for tensor in _tensors_in(values):
        if tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors_in(value)
