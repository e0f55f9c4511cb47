"""Schedule floating canvases, in widths chosen by load or by a request's own schedule.

The host learns two steps later what a step committed, and only the controller uses it:
where a canvas goes on is read on the device. Nothing here runs if `adaptive` is off.

:class:`StepClock` compares measured with predicted times of steps.
"""

import time
from collections import deque
from typing import Any, NamedTuple

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.carriers import StepWidth, pack_width, unpack_committed
from dllm_plugin.config.cuda_graphs import OUR_WORKERS, allowed_widths
from dllm_plugin.config.worker_carriers import RESUMED, pack_id
from dllm_plugin.decoding.step_costs import MeasuredCosts
from dllm_plugin.decoding.widths import WidthController, widths_between
from dllm_plugin.engine.scheduling.page_hashes import PromptPages
from dllm_plugin.engine.scheduling.reporting import RequestCounts
from dllm_plugin.engine.scheduling.scheduler import DiffusionScheduler
from dllm_plugin.models.checkpoints.step_costs import step_costs

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


logger = init_logger("vllm.dllm_plugin")

MEASURED = (
    "Widths are chosen by the times of steps, measured when their graphs were captured and "
    "corrected as steps run."
)
MODELLED = "Widths are chosen by a model of step costs: no measured times were found."
NO_FULL_GRAPHS = (
    "Under cudagraph_mode %s widths have no full CUDA graphs, so each forward is launched piece by "
    "piece, which makes small steps slower and keeps them from being measured: use "
    "FULL_AND_PIECEWISE%s."
)


def warn_without_graphs(vllm_config: VllmConfig) -> None:
    """Warn if a GPU's steps of one width have no full CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE
    if current_platform.is_cuda() and not mode.has_full_cudagraphs():
        stands = {
            "enforce_eager": vllm_config.model_config.enforce_eager,
            "a worker_cls of your own": vllm_config.parallel_config.worker_cls
            not in OUR_WORKERS,
        }
        also = " and ".join(name for name, in_the_way in stands.items() if in_the_way)
        logger.warning(NO_FULL_GRAPHS, mode.name, also and f" without {also}")


class RecordedCounts(RequestCounts):
    """Record the width of each forward of a request, and what it committed."""

    def observe(
        self, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        """Record a forward, also if not asked for: `dllm_schedule` and preemption need it."""
        pack_width(self, num_draft_tokens, num_accepted)


class AdaptiveScheduler(DiffusionScheduler):
    """Schedule a share of every canvas; record the widths of each request.

    _next    of requests with a schedule of their own, how many forwards were scheduled
    _untold  requests that ask for no statistics
    _pages   of each request, the hasher of its pages; empty without prefix caching
    """

    counts_class = RecordedCounts
    counts_steps = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.decode_config
        widths = widths_between(config.min_window, config.max_window)
        costs = step_costs(self.vllm_config, config)
        # Only measured times are compared: a model of costs counts in units.
        self.clock = StepClock() if isinstance(costs, MeasuredCosts) else None
        logger.info(MODELLED if self.clock is None else MEASURED)
        warn_without_graphs(self.vllm_config)
        self.controller = WidthController(
            widths,
            config.family.logits_shift,
            costs,
            config.adaptive == "balanced",
            allowed_widths(self.vllm_config, config, widths),
        )
        self._width = config.max_window
        self._schedules: dict[str, tuple[int, ...]] = {}
        self._next: dict[str, int] = {}
        self._untold: set[str] = set()
        self._pages: dict[str, PromptPages] = {}
        self._reported_changes = 0

    def add_request(self, request: Request) -> None:
        """Admit a request, with the schedule that it may bring."""
        asked = self.arguments_of(request)
        if asked.schedule is not None:
            self._schedules[request.request_id] = asked.schedule
            self._next[request.request_id] = 0
        super().add_request(request)
        if self.kv_cache_manager.enable_caching:
            pages = PromptPages(request, self.block_size)
            self._pages[request.request_id] = pages
            # vLLM has no public way to a request's hashes.
            request._block_hasher = pages
        if request.spec_decode_metrics is None:
            # vLLM records forwards only in these.
            self._untold.add(request.request_id)
            request.spec_decode_metrics = self._counts[request.request_id]

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._schedules.pop(request.request_id, None)
        self._next.pop(request.request_id, None)
        pages = self._pages.pop(request.request_id, None)
        if pages is not None:
            pages.evict(self.kv_cache_manager, request.request_id)
        if request.request_id in self._untold:
            self._untold.discard(request.request_id)
            request.spec_decode_metrics = None
        return super()._free_request(request, delay_free_blocks)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule, and send the pieces of requests that come back."""
        output = super().schedule(throttle_prefills)
        for data in output.scheduled_new_reqs:
            pieces = self._pieces(data.req_id)
            if pieces:
                data.req_id = pack_id(data.req_id, RESUMED, pieces)
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempt as vLLM does, and keep only the prompt's pages in the cache."""
        pages = self._pages.get(request.request_id)
        if pages is not None:
            pages.evict(self.kv_cache_manager, request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def _pieces(self, request_id: str) -> tuple[int, ...]:
        """Return where the pieces of a request that comes back end, absolute."""
        end, ends = self.requests[request_id].num_prompt_tokens, []
        for tokens in unpack_committed(self._counts[request_id]):
            end += tokens
            if tokens:
                ends.append(end)
        return tuple(ends)

    def _first_tail(self, request: Request) -> int:
        """Return 0: the prompt's partial block is final when it is prefilled."""
        return 0

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Choose how many positions of each canvas the next step computes."""
        super()._update_after_schedule(scheduler_output)
        # Pages are counted anyway, so no loop over requests is needed.
        pages = self.kv_cache_manager.usage * (self.cache_config.num_gpu_blocks or 0)
        context = int(pages * self.block_size)
        if self.clock is not None:
            self.clock.scheduled(*self._predicted(scheduler_output, context))
        if self.running:
            self._width = self.controller.width(len(self.running), context)
        # All requests of this step share this list of drafts, which is new in each step.
        del self._spec_token_placeholders[self._width :]
        for request_id in scheduler_output.num_scheduled_tokens.keys() & self._next:
            self._take_own_width(request_id, scheduler_output)

    def _predicted(
        self, output: SchedulerOutput, context: int
    ) -> tuple[float | None, int, int]:
        """Return time, requests and width of a step; no time if not all of it has that width."""
        requests = len(output.num_scheduled_tokens)
        total = output.total_num_scheduled_tokens
        if self._next or not requests or total % requests:
            return None, requests, 0
        if len(output.scheduled_spec_decode_tokens) < requests:
            return None, requests, 0
        width = total // requests
        return self.controller.costs.step(requests, width, context), requests, width

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as the base class does, and measure the step's time."""
        timed = None if self.clock is None else self.clock.finished()
        if timed is not None:
            self.controller.observe_time(*timed)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_own_width(
        self, request_id: str, scheduler_output: SchedulerOutput
    ) -> None:
        """Set the number of drafts of a request that has a schedule."""
        if request_id in scheduler_output.scheduled_spec_decode_tokens:
            self._next[request_id] += 1
        request, widths = self.requests[request_id], self._schedules[request_id]
        if request.spec_token_ids:  # empty before the last chunk of a prompt
            width = widths[min(self._next[request_id], len(widths) - 1)]
            request.spec_token_ids = [-1] * width

    def _record_start(self, request_id: str, cached_tokens: int) -> None:
        """Do nothing: counts record widths instead."""

    def _step_width(self, stats: SpecDecodingStats | None) -> StepWidth | None:
        """Learn what a step's width brings, and return it."""
        if stats is None:
            return None
        self._learn(stats)
        changes = self.controller.changes - self._reported_changes
        self._reported_changes = self.controller.changes
        scale = 0.0 if self.clock is None else self.clock.scale
        return StepWidth(self._width, changes, *self.controller.fitted, scale)

    def _learn(self, step: SpecDecodingStats) -> None:
        """Teach the controller what a step committed, if all its canvases had one known width."""
        width, rest = divmod(step.num_draft_tokens, step.num_drafts)
        if not rest and not self._next and width in self.controller.acceptance.places:
            self.controller.observe(width, step.num_drafts, step.num_accepted_tokens)
