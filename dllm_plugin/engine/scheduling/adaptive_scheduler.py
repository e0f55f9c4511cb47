"""Schedule floating canvases: as many positions of each as load says, or its own schedule.

What a step committed is known on the host two steps later, and only teaches the controller: where a
canvas goes on is read on the device. Nothing here runs where `adaptive` is off.
"""

from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.adaptive import schedule_of
from dllm_plugin.config.cuda_graphs import OUR_WORKERS, allowed_widths
from dllm_plugin.decoding.step_costs import MeasuredCosts
from dllm_plugin.decoding.widths import WidthController, widths_between
from dllm_plugin.engine.metrics import told
from dllm_plugin.engine.scheduling.prompt_pages import PromptPages
from dllm_plugin.engine.scheduling.reporting import RequestCounts
from dllm_plugin.engine.scheduling.scheduler import DiffusionScheduler
from dllm_plugin.engine.scheduling.step_clock import StepClock
from dllm_plugin.models.checkpoints.step_costs import step_costs
from dllm_plugin.state.preempted import ResumedId

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
    """Say what it costs that a GPU's steps of one width have no full CUDA graphs."""
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
        """Record a forward, asked for or not: `dllm_schedule` and preemption need it."""
        self.per_step_drafted.append(num_draft_tokens)
        self.per_step_accepted.append(num_accepted)


class AdaptiveScheduler(DiffusionScheduler):
    """Schedule a share of every canvas; record the widths of each request.

    _next    of requests with a schedule of their own, how many of their forwards were scheduled
    _untold  requests that asked for no statistics
    _pages   of each request, what hashes its pages; empty without prefix caching
    """

    counts_class = RecordedCounts
    counts_steps = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.decode_config
        widths = widths_between(config.min_window, config.max_window)
        costs = step_costs(self.vllm_config, config)
        # Times are compared where they were measured: a model counts in units.
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
        self._schedules: dict[str, list[int]] = {}
        self._next: dict[str, int] = {}
        self._untold: set[str] = set()
        self._pages: dict[str, PromptPages] = {}
        self._told_changes = 0

    def add_request(self, request: Request) -> None:
        """Admit a request, with the schedule that it may bring."""
        params = request.sampling_params
        assert params is not None
        schedule = schedule_of(params.extra_args)
        if schedule is not None:
            self._schedules[request.request_id] = schedule
            self._next[request.request_id] = 0
        super().add_request(request)
        if self.kv_cache_manager.enable_caching:
            pages = self._pages[request.request_id] = PromptPages(
                request, self.block_size
            )
            request._block_hasher = (
                pages  # vLLM has no other door to a request's hashes
            )
        if request.spec_decode_metrics is None:
            # vLLM records what a request is told.
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
        """Schedule, and say of requests that come back in which pieces they were committed."""
        output = super().schedule(throttle_prefills)
        for data in output.scheduled_new_reqs:
            counts = self._counts[data.req_id]
            if counts.per_step_accepted:
                data.req_id = ResumedId(data.req_id, self._pieces(data.req_id, counts))
        return output

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempt as vLLM does; of what the request wrote it finds its prompt's pages alone."""
        pages = self._pages.get(request.request_id)
        if pages is not None:
            pages.evict(self.kv_cache_manager, request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def _pieces(self, request_id: str, counts: RequestCounts) -> tuple[int, ...]:
        """Return where the pieces of a request that comes back end, absolute."""
        end, ends = self.requests[request_id].num_prompt_tokens, []
        for tokens in filter(None, counts.per_step_accepted):
            end += tokens
            ends.append(end)
        return tuple(ends)

    def _first_tail(self, request: Request) -> int:
        """Return 0: the prompt's partial block is final when it is prefilled."""
        return 0

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Choose how many positions of each canvas the next step computes."""
        super()._update_after_schedule(scheduler_output)
        # By pages, which are counted anyway: nothing is asked of each request.
        pages = self.kv_cache_manager.usage * (self.cache_config.num_gpu_blocks or 0)
        context = int(pages * self.block_size)
        if self.clock is not None:
            self.clock.scheduled(*self._predicted(scheduler_output, context))
        if self.running:
            self._width = self.controller.width(len(self.running), context)
        # The drafts of all requests of this step are this one list, which is new in each step.
        del self._spec_token_placeholders[self._width :]
        for request_id in scheduler_output.num_scheduled_tokens.keys() & self._next:
            self._take_own_width(request_id, scheduler_output)

    def _predicted(
        self, output: SchedulerOutput, context: int
    ) -> tuple[float | None, int, int]:
        """Return time, requests and width of a step; no time if not all of it has that width."""
        requests, total = (
            len(output.num_scheduled_tokens),
            output.total_num_scheduled_tokens,
        )
        if self._next or not requests or total % requests:
            return None, requests, 0
        if len(output.scheduled_spec_decode_tokens) < requests:
            return None, requests, 0
        width = total // requests
        return self.controller.costs.step(requests, width, context), requests, width

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as ever, and take the step's time."""
        timed = None if self.clock is None else self.clock.finished()
        if timed is not None:
            self.controller.observe_time(*timed)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_own_width(
        self, request_id: str, scheduler_output: SchedulerOutput
    ) -> None:
        """Give a request with a schedule as many drafts as that says."""
        if request_id in scheduler_output.scheduled_spec_decode_tokens:
            self._next[request_id] += 1
        request, widths = self.requests[request_id], self._schedules[request_id]
        if request.spec_token_ids:  # not in front of the last chunk of a prompt
            width = widths[min(self._next[request_id], len(widths) - 1)]
            request.spec_token_ids = [-1] * width

    def _note_start(
        self, request_id: str, counts: RequestCounts, num_tokens: int
    ) -> None:
        """Note nothing: the list holds widths."""

    def make_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> SchedulerStats | None:
        """Return vLLM's numbers of a step, and learn from them what its width brings."""
        if spec_decoding_stats is not None:
            self._learn(spec_decoding_stats)
            changes = self.controller.changes
            scale = None if self.clock is None else self.clock.scale
            moved = changes - self._told_changes
            self._ended += told(self._width, moved, self.controller.fitted, scale)
            self._told_changes = changes
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def _learn(self, step: SpecDecodingStats) -> None:
        """Teach the controller what a step committed, if all its canvases had one known width."""
        width, rest = divmod(step.num_draft_tokens, step.num_drafts)
        if not rest and not self._next and width in self.controller.acceptance.places:
            self.controller.observe(width, step.num_drafts, step.num_accepted_tokens)
