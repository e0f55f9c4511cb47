"""Schedule floating canvases, in widths chosen by load or by a request's own schedule.

The host learns two steps later what a step committed, and only the controller uses it:
where a canvas goes on is read on the device. Nothing here runs if `adaptive` is off.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from dllm_plugin.config.carriers import pack_width, unpack_committed
from dllm_plugin.config.worker_carriers import RESUMED, pack_id

from .load_scheduler import LoadScheduler
from .page_hashes import PromptPages
from .reporting import RequestCounts


class RecordedCounts(RequestCounts):
    """Record the width of each forward of a request, and what it committed."""

    def observe(
        self, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        """Record a forward, also if not asked for: `dllm_schedule` and preemption need it."""
        pack_width(self, num_draft_tokens, num_accepted)


class AdaptiveScheduler(LoadScheduler):
    """Schedule a share of every canvas; record the widths of each request."""

    counts_class = RecordedCounts

    def add_request(self, request: Request) -> None:
        """Admit a request, with the schedule that it may bring."""
        super().add_request(request)
        record = self.records[request.request_id]
        if record.asked.schedule is not None:
            self._own.add(request.request_id)
        if self.kv_cache_manager.enable_caching:
            record.pages = PromptPages(request, self.block_size)
            # vLLM has no public way to a request's hashes.
            request._block_hasher = record.pages
        if request.spec_decode_metrics is None:
            # vLLM records forwards only in these.
            record.is_untold = True
            request.spec_decode_metrics = record.counts

    def _forget(self, request: Request) -> None:
        self._evict(request)
        record = self.records.get(request.request_id)
        if record is not None and record.is_untold:
            request.spec_decode_metrics = None
        super()._forget(request)

    def _evict(self, request: Request) -> None:
        """Evict the pages of a request's generated text from the prefix cache."""
        record = self.records.get(request.request_id)
        if record is not None and record.pages is not None:
            record.pages.evict(self.kv_cache_manager, request.request_id)

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
        self._evict(request)
        super()._preempt_request(request, *args, **kwargs)

    def _pieces(self, req_id: str) -> tuple[int, ...]:
        """Return where the pieces of a request that comes back end, absolute."""
        end = self.requests[req_id].num_prompt_tokens
        ends = []
        for tokens in unpack_committed(self.records[req_id].counts):
            end += tokens
            if tokens:
                ends.append(end)
        return tuple(ends)

    def _first_tail(self, request: Request) -> int:
        """Return 0: the prompt's partial block is final when it is prefilled."""
        return 0

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        """Choose how many positions of each canvas the next step computes."""
        super()._update_after_schedule(output)
        self._choose_width()
        # All requests of this step share this list of drafts, which is new in each step.
        del self._spec_token_placeholders[self._width :]
        for req_id in output.num_scheduled_tokens.keys() & self._own:
            in_step = req_id in output.scheduled_spec_decode_tokens
            record = self.records[req_id]
            request = self.requests[req_id]
            widths = record.asked.schedule
            assert widths is not None
            record.forwards += in_step
            if request.spec_token_ids:  # empty before the last chunk of a prompt
                width = widths[min(record.forwards, len(widths) - 1)]
                request.spec_token_ids = [-1] * width

    def _record_start(self, req_id: str, cached_tokens: int) -> None:
        """Do nothing: counts record widths instead."""
