"""Count what each request computes; report it with its output, and all on /metrics.

The scheduler's base class: it decides nothing. A request's numbers travel in vLLM's own
`RequestSpecDecodeMetrics`.
"""

from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.carriers import (
    EndedRequest,
    StepWidth,
    pack_positions,
    pack_reports,
    unpack_positions,
)
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.request.arguments import RequestArguments
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.config.worker_carriers import is_unconditional, unpack_unconditional
from dllm_plugin.engine.scheduling.watched_requests import WatchedRequests


class RequestCounts(RequestSpecDecodeMetrics):
    """Store the counts of a request, which the scheduler writes.

    histogram  forwards by the number of tokens that each committed
    ahead      drafts that the next forward of a stride judges
    """

    ahead = 0

    def observe(
        self, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        """Do nothing: vLLM calls this only for requests that ask for their counts."""


class ReportingScheduler(AsyncScheduler):
    """Count the forwards and positions of every request."""

    decode_config: DecodeConfig
    counts_class = RequestCounts
    counts_steps = False  # whether steps are counted even if nobody logs them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts: dict[str, RequestCounts] = {}
        self._with_stop_strings: set[str] = set()
        self.watched = WatchedRequests(self)
        self._ended: list[EndedRequest] = []

    def arguments_of(self, request: Request) -> RequestArguments:
        """Return the ``dllm_*`` arguments of a request, or the engine's defaults."""
        params = request.sampling_params
        assert params is not None
        return arguments_of(self.decode_config, params)

    def add_request(self, request: Request) -> None:
        """Admit a request; ``spec_decode_metrics`` has its counts unless it objects."""
        histogram = [0] * (self.num_spec_tokens + 1)
        counts = self.counts_class(self.num_spec_tokens, histogram)
        self._counts[request.request_id] = counts
        asked = self.arguments_of(request)
        if asked.is_watched and not is_unconditional(request.request_id):
            self.watched.add(request, asked, counts)
        if asked.statistics:
            request.spec_decode_metrics = counts
            if request.sampling_params is not None and request.sampling_params.stop:
                self._with_stop_strings.add(request.request_id)
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id, num_positions in scheduler_output.num_scheduled_tokens.items():
            # Charge an unconditional request to its conditional one.
            counts = self._counts.get(unpack_unconditional(request_id))
            if counts is not None:
                pack_positions(counts, num_positions)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        request_id = request.request_id
        counts = self._counts.pop(request_id, None)
        if counts is not None and self.log_stats and not is_unconditional(request_id):
            ended = EndedRequest(
                self._reason(request),
                sum(counts.histogram),
                request.num_output_tokens,
                unpack_positions(counts),
            )
            self._ended.append(ended)
        self._with_stop_strings.discard(request_id)
        self.watched.watches.pop(request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def _reason(self, request: Request) -> FinishReason:
        """Return why a request ends.

        The front end aborts a request at a stop string, as it does if a client leaves,
        and does not report which. The request's text shows it.
        """
        reason = request.get_finished_reason()
        assert reason is not None and request.sampling_params is not None
        params = request.sampling_params
        if reason != FinishReason.ABORT or not params.stop:
            return reason
        # vLLM has loaded this tokenizer at start.
        tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)
        if tokenizer is None:  # skip_tokenizer_init
            return reason
        watch = self.watched.watches.get(request.request_id)
        tokens = list(request.output_token_ids)
        if watch is not None and len(watch.tokens) > len(tokens):
            tokens = watch.tokens
        text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        found = any(stop in text for stop in params.stop)
        return FinishReason.STOP if found else reason

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count one forward as vLLM does, without its loops over positions."""
        counts = self._counts[request_id]
        self._count_forward(counts, num_draft_tokens, num_accepted_tokens)
        if not (self.log_stats or self.counts_steps):
            return None
        stats = spec_decoding_stats or SpecDecodingStats(self.num_spec_tokens)
        stats.num_drafts += 1
        stats.num_draft_tokens += num_draft_tokens
        stats.num_accepted_tokens += num_accepted_tokens
        return stats

    def _count_forward(self, counts: RequestCounts, rows: int, tokens: int) -> None:
        """Count a forward of a request: the positions it computed, the tokens it committed."""
        counts.histogram[tokens] += 1

    def make_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> SchedulerStats | None:
        """Return vLLM's numbers of a step, with requests that ended and its width.

        :class:`dllm_plugin.engine.metrics.DenoisingMetrics` reads them in front ends.
        """
        width = self._step_width(spec_decoding_stats)
        if self._ended or width is not None:
            stats = spec_decoding_stats or SpecDecodingStats(self.num_spec_tokens)
            pack_reports(stats, self._ended, width)
            spec_decoding_stats, self._ended = stats, []
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def _step_width(self, stats: SpecDecodingStats | None) -> StepWidth | None:
        """Return the width of a step to report; only floating canvases have any."""
        return None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as vLLM does; requests with stop strings get counts with each piece."""
        steps = self.watched.begin_step(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.watched.end_step(steps, outputs, model_runner_output.logprobs)
        if not self._with_stop_strings:
            return outputs
        for of_client in outputs.values():
            for output in of_client.outputs:
                # If the front end finds a stop string, this output is the last one.
                if output.request_id in self._with_stop_strings:
                    output.spec_decode_metrics = self._counts[output.request_id]
        return outputs
