"""Schedule as many positions of canvases as pay by load, or as many drafts.

A :class:`WidthController` chooses. It learns from what steps committed, which the host knows
already, and from their times: :class:`StepClock` compares measured with predicted times.
"""

import time
from collections import deque
from typing import Any, NamedTuple

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.carriers import StepWidth, pack_drafts
from dllm_plugin.config.cuda_graphs import OUR_WORKERS, allowed_widths
from dllm_plugin.config.request.parsing import given_arguments
from dllm_plugin.decoding.step_costs import MeasuredCosts
from dllm_plugin.decoding.widths import WidthController, widths_between
from dllm_plugin.models.checkpoints.step_costs import step_costs

from .reporting import Outputs, RequestCounts
from .scheduler import DiffusionScheduler

logger = init_logger("vllm.dllm_plugin")

MEASURED = (
    "%s are chosen by the times of steps, measured when their graphs were captured and "
    "corrected as steps run."
)
MODELLED = "%s are chosen by a model of step costs: no measured times were found."
NO_FULL_GRAPHS = (
    "Under cudagraph_mode %s widths have no full CUDA graphs, so each forward is launched piece by "
    "piece, which makes small steps slower and keeps them from being measured: use "
    "FULL_AND_PIECEWISE%s."
)

SMOOTHING = 1 / 64  # of steps
LEAST, MOST = 0.5, 2.0


class _Scheduled(NamedTuple):
    """Store a step in flight; `queued`: it waits for another step that computes something."""

    predicted_ms: float | None
    requests: int
    width: int
    queued: bool


class StepClock:
    """Track the ratio of observed to predicted times of steps.

    scale  that ratio, an exponential mean over steps of all widths, for `/metrics`
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._in_flight: deque[_Scheduled] = deque()
        self._last: float | None = None

    def scheduled(self, predicted_ms: float | None, requests: int, width: int) -> None:
        """Add a step; a time of None excludes it, as it has a prompt."""
        queued = bool(self._in_flight) and self._in_flight[-1].requests > 0
        self._in_flight.append(_Scheduled(predicted_ms, requests, width, queued))

    def finished(self) -> tuple[int, int, float] | None:
        """Return requests, width and time ratio of the oldest step, if it was queued."""
        now, before = time.perf_counter(), self._last
        self._last = now
        if not self._in_flight:
            return None
        step = self._in_flight.popleft()
        if step.predicted_ms is None or not step.queued or before is None:
            return None
        ratio = 1000 * (now - before) / step.predicted_ms
        self.scale += SMOOTHING * (min(max(ratio, LEAST), MOST) - self.scale)
        return step.requests, step.width, ratio


def warn_without_graphs(vllm_config: VllmConfig) -> None:
    """Warn if a GPU's steps of one width have no full CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
    if not current_platform.is_cuda() or mode.has_full_cudagraphs():
        return
    also = []
    if vllm_config.model_config.enforce_eager:
        also.append("enforce_eager")
    if vllm_config.parallel_config.worker_cls not in OUR_WORKERS:
        also.append("a worker_cls of your own")
    without = f" without {' and '.join(also)}" if also else ""
    logger.warning(NO_FULL_GRAPHS, mode.name, without)


class LoadScheduler(DiffusionScheduler):
    """Let a controller choose how many positions of each canvas a step computes.

    _own  requests with numbers of their own
    """

    counts_steps = True
    chosen = "Widths"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.decode_config
        widths = config.draft_rows
        if not widths:
            widths = widths_between(config.min_window, config.max_window)
        costs = step_costs(self.vllm_config, config)
        # Only measured times are compared: a model of costs counts in units.
        self.clock = StepClock() if isinstance(costs, MeasuredCosts) else None
        logger.info(MODELLED if self.clock is None else MEASURED, self.chosen)
        warn_without_graphs(self.vllm_config)
        self.controller = WidthController(
            widths,
            config.family.logits_shift,
            costs,
            config.adaptive == "balanced",
            allowed_widths(self.vllm_config, config, widths),
            config.method.drafted,
        )
        self._width = widths[-1]
        self._own: set[str] = set()
        self._reported_changes = 0

    def _forget(self, request: Request) -> None:
        self._own.discard(request.request_id)
        super()._forget(request)

    def _context(self) -> int:
        """Return the tokens of context of all requests, by their pages."""
        # Pages are counted anyway, so no loop over requests is needed.
        pages = self.cache_config.num_gpu_blocks or 0
        used = self.kv_cache_manager.usage * pages
        return int(used * self.block_size)

    def _choose_width(self) -> None:
        """Choose the width of the next step."""
        running = len(self.running)
        if running:
            self._width = self.controller.width(running, self._context())

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        """Predict the time of the step."""
        super()._update_after_schedule(output)
        if self.clock is not None:
            self.clock.scheduled(*self._predicted(output))

    def _predicted(self, output: SchedulerOutput) -> tuple[float | None, int, int]:
        """Return time, requests and width of a step; no time if not all of it has that width."""
        requests = len(output.num_scheduled_tokens)
        canvases = len(output.scheduled_spec_decode_tokens)
        if self._own or not requests or canvases < requests:
            return None, requests, 0
        width, rest = divmod(output.total_num_scheduled_tokens, requests)
        if rest:
            return None, requests, 0
        time_ms = self.controller.costs.step(requests, width, self._context())
        return time_ms, requests, width

    def update_from_output(
        self, output: SchedulerOutput, results: ModelRunnerOutput
    ) -> Outputs:
        """Update as the base class does, and measure the step's time."""
        timed = None if self.clock is None else self.clock.finished()
        if timed is not None:
            self.controller.observe_time(*timed)
        return super().update_from_output(output, results)

    def _step_width(self, stats: SpecDecodingStats | None) -> StepWidth | None:
        """Learn what a step's width brings, and return it."""
        if stats is None:
            return None
        width, rest = divmod(stats.num_draft_tokens, stats.num_drafts)
        # If all its canvases had one known width.
        learns = self.controller
        tokens = stats.num_accepted_tokens
        if not rest and not self._own and width in learns.acceptance.places:
            learns.observe(width, stats.num_drafts, tokens)
        changes = learns.changes - self._reported_changes
        self._reported_changes = learns.changes
        scale = 0.0 if self.clock is None else self.clock.scale
        return StepWidth(self._width, changes, *learns.fitted, scale)


class DraftScheduler(LoadScheduler):
    """Schedule as many drafts of each request as pay by load and acceptance.

    If none pay, steps are those of causal decoding. A request that names its length keeps it.
    """

    chosen = "Lengths of drafts"

    def add_request(self, request: Request) -> None:
        """Admit a request; a budget of thinking ends where a draft does, so its length stays."""
        params = request.sampling_params
        assert params is not None
        given = given_arguments(params.extra_args)
        if "block_length" in given or "max_thinking_tokens" in given:
            self._own.add(request.request_id)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose how many rows each request computes, and schedule them."""
        self._choose_width()
        return super().schedule(throttle_prefills)

    def _canvas_tokens(self, request: Request) -> int:
        rows = super()._canvas_tokens(request)
        if request.request_id in self._own:
            return rows
        return min(rows, self._width)

    def _count_forward(self, counts: RequestCounts, rows: int, tokens: int) -> None:
        """Count a forward, and the drafts that it has judged.

        A forward that drafts a block commits nothing. One of a stride judges the drafts before it,
        and drafts again if all of them were accepted.
        """
        super()._count_forward(counts, rows, tokens)
        judged = rows - 1 if tokens else 0
        if self.decode_config.method.causal_rows:
            judged = min(counts.ahead, rows - 1)
            counts.ahead = rows // 2 if tokens > judged else 0
        pack_drafts(counts, judged, min(max(tokens - 1, 0), judged))
