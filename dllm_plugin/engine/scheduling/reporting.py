"""Keep a record of each request: count what it computes, report it, and add it on /metrics.

The scheduler's base class: it decides nothing. A request's numbers travel in vLLM's own
`RequestSpecDecodeMetrics`.
"""

from dataclasses import dataclass
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.carriers import (
    EndedRequest,
    StepWidth,
    pack_positions,
    pack_reports,
    unpack_positions,
)
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.request.arguments import RequestArguments
from dllm_plugin.config.request.parsing import arguments_of
from dllm_plugin.config.worker_carriers import is_unconditional, unpack_unconditional

from .forwards_in_flight import NO_SPANS, BlockSpans
from .page_hashes import PromptPages
from .watched_requests import Trace, Watch, begin_step, end_step

Outputs = dict[int, EngineCoreOutputs]


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


@dataclass
class Record:
    """Store what the schedulers know of a request, from its arrival to its end.

    asked      its arguments
    counts     what it computed so far
    length     positions of a block

    Full attention:
    layout     fields of `Layout`
    steps      steps of a block at most; 0 if its last step may leave something
    spans      where the next forward lies

    Floating canvases:
    pages      hasher of its pages; None without prefix caching
    forwards   forwards that were scheduled by a schedule of its own
    is_untold  whether the request asks for no statistics
    """

    asked: RequestArguments
    counts: RequestCounts
    length: int
    layout: tuple[int, ...] = ()
    steps: int = 0
    spans: BlockSpans = NO_SPANS
    pages: PromptPages | None = None
    forwards: int = 0
    is_untold: bool = False


class ReportingScheduler(AsyncScheduler):
    """Count the forwards and positions of every request."""

    counts_class = RequestCounts
    counts_steps = False  # whether steps are counted even if nobody logs them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decode_config = get_decode_config(self.vllm_config)
        self.records: dict[str, Record] = {}
        self._with_stop_strings: set[str] = set()
        self.watches: dict[str, Watch] = {}
        # Log-probabilities of prompts, until a request has its first output.
        self._of_prompts: dict[str, LogprobsTensors | None] = {}
        self._ended: list[EndedRequest] = []

    def arguments_of(self, request: Request) -> RequestArguments:
        """Return the ``dllm_*`` arguments of a request, or the engine's defaults."""
        params = request.sampling_params
        assert params is not None
        return arguments_of(self.decode_config, params)

    def add_request(self, request: Request) -> None:
        """Admit a request; ``spec_decode_metrics`` has its counts unless it objects."""
        req_id = request.request_id
        params = request.sampling_params
        asked = self.arguments_of(request)
        histogram = [0] * (self.num_spec_tokens + 1)
        counts = self.counts_class(self.num_spec_tokens, histogram)
        self.records[req_id] = Record(asked, counts, asked.block_length)
        if asked.is_watched and not is_unconditional(req_id):
            rest = self.max_model_len - request.num_prompt_tokens
            most = min(request.max_tokens, rest)
            trace = Trace(most) if asked.trace else None
            self.watches[req_id] = Watch(asked, counts, most, trace)
        if asked.statistics:
            request.spec_decode_metrics = counts
            if params is not None and params.stop:
                self._with_stop_strings.add(req_id)
        super().add_request(request)

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        super()._update_after_schedule(output)
        for req_id, positions in output.num_scheduled_tokens.items():
            # Charge an unconditional request to its conditional one.
            record = self.records.get(unpack_unconditional(req_id))
            if record is not None:
                pack_positions(record.counts, positions)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._forget(request)
        return super()._free_request(request, *args, **kwargs)

    def _forget(self, request: Request) -> None:
        """Drop what is known of a request that ends, and report it."""
        req_id = request.request_id
        record = self.records.pop(req_id, None)
        if record is not None and self.log_stats and not is_unconditional(req_id):
            counts = record.counts
            tokens = request.num_output_tokens
            forwards = sum(counts.histogram)
            positions = unpack_positions(counts)
            reason = self._reason(request)
            self._ended.append(EndedRequest(reason, forwards, tokens, positions))
        self._with_stop_strings.discard(req_id)
        self.watches.pop(req_id, None)

    def _reason(self, request: Request) -> FinishReason:
        """Return why a request ends.

        The front end aborts a request at a stop string, as it does if a client leaves, and does
        not report which; by then the request may have ended at its length. Its text shows it.
        """
        reason = request.get_finished_reason()
        params = request.sampling_params
        assert reason is not None and params is not None
        may_stop = reason in (FinishReason.ABORT, FinishReason.LENGTH)
        if not may_stop or not params.stop:
            return reason
        # vLLM has loaded this tokenizer at start.
        tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)
        if tokenizer is None:  # skip_tokenizer_init
            return reason
        watch = self.watches.get(request.request_id)
        tokens = list(request.output_token_ids)
        if watch is not None and len(watch.tokens) > len(tokens):
            tokens = watch.tokens
        skips = params.skip_special_tokens
        text = tokenizer.decode(tokens, skip_special_tokens=skips)
        # None of the first tokens ends a stop string that counts.
        first = tokens[: params.min_tokens]
        start = len(tokenizer.decode(first, skip_special_tokens=skips))
        for stop in params.stop:
            if stop in text[max(0, start + 1 - len(stop)) :]:
                return FinishReason.STOP
        return reason

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count one forward as vLLM does, without its loops over positions."""
        counts = self.records[request_id].counts
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
        stats = spec_decoding_stats
        width = self._step_width(stats)
        if self._ended or width is not None:
            stats = stats or SpecDecodingStats(self.num_spec_tokens)
            pack_reports(stats, self._ended, width)
            self._ended = []
        return super().make_stats(stats, *args, **kwargs)

    def _step_width(self, stats: SpecDecodingStats | None) -> StepWidth | None:
        """Return the width of a step to report; only floating canvases have any."""
        return None

    def update_from_output(
        self, output: SchedulerOutput, results: ModelRunnerOutput
    ) -> Outputs:
        """Update as vLLM does; requests with stop strings get counts with each piece.

        vLLM sends the log-probabilities of a prompt with the output of the forward that computes
        its end. Here that forward brings no token and no output: they wait for the first output.
        """
        steps = begin_step(self.requests, self.watches, results)
        self._of_prompts |= results.prompt_logprobs_dict
        results.prompt_logprobs_dict.clear()
        outputs = super().update_from_output(output, results)
        end_step(steps, outputs, results.logprobs, self.kv_cache_manager)
        if not (self._with_stop_strings or self._of_prompts):
            return outputs
        for of_client in outputs.values():
            for each in of_client.outputs:
                req_id = each.request_id
                each.new_prompt_logprobs_tensors = self._of_prompts.pop(req_id, None)
                # If the front end finds a stop string, this output is the last.
                if req_id in self._with_stop_strings:
                    each.spec_decode_metrics = self.records[req_id].counts
        for gone in self._of_prompts.keys() - self.requests.keys():
            del self._of_prompts[gone]
        return outputs
