"""Count what each request computes, and say so: with its output, and of all on /metrics.

The scheduler's base class: it decides nothing. A request's numbers travel in vLLM's own
`RequestSpecDecodeMetrics`, whose `num_draft_tokens` is here every position that was computed for
the request, prompt and refreshes included.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.request.reporting import reporting
from dllm_plugin.engine.scheduling.traces import Trace
from dllm_plugin.engine.scheduling.watched_requests import (
    Watch,
    WatchedStep,
    report,
    take_rows,
)
from dllm_plugin.sampling.guidance import conditional_id, is_unconditional


class RequestCounts(RequestSpecDecodeMetrics):
    """Count forwards by what they committed, and positions; the scheduler writes both.

    `per_step_drafted` holds how many prompt tokens were cached, which vLLM tells of one choice of
    a request alone, and the place in WAYS of how a request with a grammar keeps to it; vLLM shows
    the list to nobody while `per_step_accepted` is empty. Where canvases float it holds what vLLM
    means by it, the widths of the forwards, and `per_step_accepted` what they committed.
    """

    def observe(
        self, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        """Do nothing: vLLM calls this for requests alone that are told their counts."""


class ReportingScheduler(AsyncScheduler):
    """Count the forwards and positions of every request."""

    counts_class = RequestCounts
    counts_steps = False  # whether steps are counted also where nobody logs them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts: dict[str, RequestCounts] = {}
        self._with_stop_strings: set[str] = set()
        self._watches: dict[str, Watch] = {}
        self._ended: list[
            int
        ] = []  # forwards, tokens, positions of each request that ended

    def add_request(self, request: Request) -> None:
        """Admit a request; it is told its counts in ``spec_decode_metrics`` unless it objects."""
        params = request.sampling_params
        assert params is not None
        counts = self.counts_class(
            self.num_spec_tokens, [0] * (self.num_spec_tokens + 1)
        )
        self._counts[request.request_id] = counts
        asked = reporting(params.extra_args)
        if asked.watches and not is_unconditional(request.request_id):
            most = min(
                request.max_tokens, self.max_model_len - request.num_prompt_tokens
            )
            trace = Trace(most) if asked.trace else None
            self._watches[request.request_id] = Watch(asked, counts, trace)
        if asked.statistics:
            request.spec_decode_metrics = counts
            if params.stop:
                self._with_stop_strings.add(request.request_id)
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        counts = self._counts
        for data in scheduler_output.scheduled_new_reqs:
            self._note_start(data.req_id, counts[data.req_id], data.num_computed_tokens)
        for request_id, num_positions in scheduler_output.num_scheduled_tokens.items():
            # What guides a request is computed for it.
            asking = (
                conditional_id(request_id)
                if is_unconditional(request_id)
                else request_id
            )
            if asking in counts:
                counts[asking].num_draft_tokens += num_positions

    def _note_start(
        self, request_id: str, counts: RequestCounts, num_tokens: int
    ) -> None:
        """Note how many tokens of a prompt were cached."""
        if not counts.per_step_drafted:  # one that was preempted may come as a new one
            counts.per_step_drafted.append(num_tokens)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._with_stop_strings.discard(request.request_id)
        self._watches.pop(request.request_id, None)
        counts = self._counts.pop(request.request_id, None)
        hidden = is_unconditional(request.request_id)
        # Also of aborted requests: one that meets a stop string is aborted by the front end.
        if (
            counts is not None
            and self.log_stats
            and not hidden
            and any(counts.histogram)
        ):
            forwards = sum(counts.histogram)
            self._ended += (
                forwards,
                request.num_output_tokens,
                counts.num_draft_tokens,
            )
        return super()._free_request(request, delay_free_blocks)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count one forward as vLLM does, without its loops over positions."""
        self._counts[request_id].histogram[num_accepted_tokens] += 1
        if not (self.log_stats or self.counts_steps):
            return None
        stats = spec_decoding_stats or SpecDecodingStats(self.num_spec_tokens)
        stats.num_drafts += 1
        stats.num_draft_tokens += num_draft_tokens
        stats.num_accepted_tokens += num_accepted_tokens
        return stats

    def make_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> SchedulerStats | None:
        """Return vLLM's numbers of a step, and those of the requests that ended.

        They travel in ``num_draft_tokens_per_pos``, three integers a request: only
        :class:`dllm_plugin.engine.metrics.DenoisingMetrics` reads that list in front ends.
        """
        if self._ended:
            spec_decoding_stats = spec_decoding_stats or SpecDecodingStats(
                self.num_spec_tokens
            )
            spec_decoding_stats.num_draft_tokens_per_pos = self._ended
            self._ended = []
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as vLLM does; requests with stop strings are told their counts with each piece."""
        steps = self._watched_steps(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for step in steps:
            self._report(step, outputs, model_runner_output.logprobs)
        if self._with_stop_strings:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    # The front end may find a stop string in this piece, and hears no more then.
                    if output.request_id in self._with_stop_strings:
                        output.spec_decode_metrics = self._counts[output.request_id]
        return outputs

    def _watched_steps(self, output: ModelRunnerOutput) -> list[WatchedStep]:
        """Return what a step decided of requests that are watched, before they are updated."""
        rows = take_rows(output)
        if not rows:
            return []
        ids = {
            place: request_id for request_id, place in output.req_id_to_index.items()
        }
        steps = []
        for place, row in rows:
            request, watch = (
                self.requests.get(ids[place]),
                self._watches.get(ids[place]),
            )
            # One that was aborted meanwhile is told nothing, nor is a result that vLLM drops.
            if request is None or watch is None or request.is_finished():
                continue
            if request.num_stale_output_tokens > 0 and request.drop_stale_output:
                continue
            steps.append(
                WatchedStep(watch, request, place, request.num_output_tokens, *row)
            )
        return steps

    def _report(
        self,
        step: WatchedStep,
        outputs: dict[int, EngineCoreOutputs],
        lists: LogprobsLists | None,
    ) -> None:
        """Put a watched request's snapshot and early text among the outputs of a step."""
        request = step.request
        of_client = outputs.setdefault(
            request.client_index, EngineCoreOutputs(outputs=[])
        )
        found = (
            i
            for i, o in enumerate(of_client.outputs)
            if o.request_id == request.request_id
        )
        place = next(found, None)
        output = report(
            step,
            None if place is None else of_client.outputs[place],
            lists,
            self.max_model_len,
        )
        if place is not None:
            del of_client.outputs[place]
        if output is None:
            return
        stats = request.take_prefill_stats()
        if stats is not None:
            stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
            output.prefill_stats = stats
        of_client.outputs.append(output)
