"""Schedule floating canvases, in widths chosen by load or by a request's own schedule.

The host learns two steps later what a step committed, and only the controller uses it:
where a canvas goes on is read on the device. Nothing here runs if `adaptive` is off.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from dllm_plugin.config.carriers import pack_width, unpack_committed
from dllm_plugin.config.worker_carriers import RESUMED, pack_id
from dllm_plugin.engine.scheduling.load_scheduler import LoadScheduler
from dllm_plugin.engine.scheduling.page_hashes import PromptPages
from dllm_plugin.engine.scheduling.reporting import RequestCounts


class RecordedCounts(RequestCounts):
    """Record the width of each forward of a request, and what it committed."""

    def observe(
        self, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        """Record a forward, also if not asked for: `dllm_schedule` and preemption need it."""
        pack_width(self, num_draft_tokens, num_accepted)


class AdaptiveScheduler(LoadScheduler):
    """Schedule a share of every canvas; record the widths of each request.

    _next    of requests with a schedule of their own, how many forwards were scheduled
    _untold  requests that ask for no statistics
    _pages   of each request, the hasher of its pages; empty without prefix caching
    """

    counts_class = RecordedCounts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._schedules: dict[str, tuple[int, ...]] = {}
        self._next: dict[str, int] = {}
        self._untold: set[str] = set()
        self._pages: dict[str, PromptPages] = {}

    def add_request(self, request: Request) -> None:
        """Admit a request, with the schedule that it may bring."""
        asked = self.arguments_of(request)
        if asked.schedule is not None:
            self._schedules[request.request_id] = asked.schedule
            self._next[request.request_id] = 0
            self._own.add(request.request_id)
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
        self._choose_width()
        # All requests of this step share this list of drafts, which is new in each step.
        del self._spec_token_placeholders[self._width :]
        for request_id in scheduler_output.num_scheduled_tokens.keys() & self._next:
            self._take_own_width(request_id, scheduler_output)

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
