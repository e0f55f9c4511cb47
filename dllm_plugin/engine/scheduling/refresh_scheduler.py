"""Schedule full attention: the host knows where the next forward of each request starts.

A request's first forward computes prompt and canvas: it waits until pages for both are
reserved. Later forwards start where the strategy says. A forward that does not fit the
step's budget of tokens waits for the next step, because none may be cut.
"""

from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm_plugin.config.decode import layout_of
from dllm_plugin.config.request.arguments import RequestArguments, Template
from dllm_plugin.config.worker_carriers import (
    is_unconditional,
    unpack_masks_left,
    unpack_unconditional,
)
from dllm_plugin.decoding.full_attention import NO_TEMPLATE, Bounds, Layout, bounds
from dllm_plugin.decoding.method import SpanFunction

from .forwards_in_flight import BlockSpans, ForwardsInFlight
from .guided_scheduler import GuidedScheduler
from .reporting import Outputs

logger = init_logger("vllm.dllm_plugin")


class RefreshScheduler(GuidedScheduler):
    """Schedule refreshes and cached forwards of different requests in one step.

    Asynchronously, forwards of a block are launched before earlier results are known, see
    :mod:`dllm_plugin.engine.scheduling.forwards_in_flight`. A refresh waits for the result
    before it, unless a step in flight must finish the block: launched for nothing, a refresh
    would overwrite keys that are in use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        span = self.decode_config.method.span
        assert span is not None, "only full attention is scheduled here"
        self.span: SpanFunction = span
        # More than a canvas: of what is given after a last gap, each position counts as a draft.
        self._placeholders = [-1] * self.max_model_len
        # Tokens that this step may still compute.
        self._left = 0
        # Conditional requests that this step computes.
        self._guided: set[str] = set()
        # Leading tokens that a template gives, of requests that have no output so far.
        self._given: dict[str, list[int]] = {}
        self.in_flight = ForwardsInFlight()

    def _bound_requests(self) -> None:
        """Do nothing: forwards differ in size, and each is checked when it is scheduled."""

    def _bounds(self, requests: list[Request]) -> Bounds:
        rows, starts = [], []
        for request in requests:
            rows.append(self.records[request.request_id].layout)
            starts.append(_start_of(request))
        layout = Layout(*np.array(rows, dtype=np.int64).T)
        start = np.array(starts, dtype=np.int64)
        config = self.decode_config
        limits = (config.canvas_length, self.max_model_len)
        return bounds(layout, start, *limits, config.method.exact_end)

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Admit a request, and lay out its blocks."""
        super().add_request(request)
        req_id = request.request_id
        asked = self.records[req_id].asked
        template = asked.template
        self._lay_out(request, asked, template)
        given: list[int] = []
        if template is not None:
            given = template.given_blocks(asked.block_length)
        if given:
            # The request starts as if it had the leading blocks that its template gives.
            request.append_output_token_ids(given)
            self._given[req_id] = given
            if req_id in self.watches:
                self.watches[req_id].give(given)
        hidden = self._other_of_pair(req_id)
        if hidden is not None:
            self._lay_out(self.requests[hidden], asked)

    def _lay_out(
        self,
        request: Request,
        asked: RequestArguments,
        template: Template | None = None,
    ) -> None:
        params = request.sampling_params
        start = request.num_prompt_tokens
        assert params is not None
        req_id = request.request_id
        record = self.records[req_id]
        # No canvas is cut at the end of the context: the next canvas waits for its result.
        self._long.discard(req_id)
        end = min(start + request.max_tokens, self.max_model_len)
        policy = self.decode_config.method.policies[asked.policy]
        # Positions may be withheld after the policy, also in the last step.
        withholds = params.bad_words_token_ids or asked.withholds
        if policy.takes_rest and not withholds:
            record.steps = asked.steps
        record.layout = layout_of(asked, start, end, template)

    def _forget(self, request: Request) -> None:
        self.in_flight.forget(request.request_id)
        super()._forget(request)

    # One step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does, in forwards as :meth:`_tokens_to_compute` sizes them."""
        self._left = self.max_num_scheduled_tokens
        self._guided.clear()
        return super().schedule(throttle_prefills)

    def _tokens_to_compute(self, request: Request, start: int, new: int) -> int:
        """Return how many tokens of a request to compute: its whole forward, or 0."""
        req_id = request.request_id
        if request.status == RequestStatus.RUNNING:
            if not self._prepare_forward(request):
                return 0
            canvas = _start_of(request) - request.num_computed_tokens
            wanted = canvas + len(request.spec_token_ids)
        else:
            wanted = int(self._bounds([request]).stop[0])
        if is_unconditional(req_id):
            # Its conditional request comes right before it and has reserved for both.
            reserved = unpack_unconditional(req_id) in self._guided
            return wanted if reserved else 0
        halves = 1 if self._other_of_pair(req_id) is None else 2
        whole = wanted * halves
        if whole > self._left or not self._has_room(request, wanted, halves):
            return 0
        self._left -= whole
        if halves == 2:
            self._guided.add(req_id)
        return wanted

    def _prepare_forward(self, request: Request) -> bool:
        """Prepare a request's next forward, unless it depends on a result in flight."""
        req_id = request.request_id
        start = request.num_tokens
        if not self.in_flight.count(req_id, start):
            return True
        # Reports and grammars need each result; half of a pair may turn out not to fit.
        by_step = req_id in self.watches or req_id in self._with_grammar
        by_step |= self._other_of_pair(req_id) is not None
        record = self.records[req_id]
        _, _, length, every, before, _, tail = record.layout
        # A void forward starts where the next refresh does: its pages must be reserved.
        may_overshoot = every > 1 and before < length
        if by_step or may_overshoot or tail != NO_TEMPLATE:
            return False
        if self.in_flight.is_last(req_id, start, record.steps):
            return self._place_next_block(request)
        return self.in_flight.expects_another(req_id, start)

    def _place_next_block(self, request: Request) -> bool:
        """Place the refresh after a block that ends with the forwards in flight, if any.

        The block's tokens count as placeholders, as vLLM counts tokens that it does not know.
        """
        req_id = request.request_id
        record = self.records[req_id]
        self._find_spans([request])
        size = record.spans.size
        end = record.layout[1]
        block_end = request.num_tokens + size
        if block_end >= end or self.in_flight.count(req_id, block_end):
            return False
        request.num_output_placeholders = size
        self._find_spans([request])
        start, num_drafts = record.spans.refresh
        if block_end + num_drafts - start > self._left:
            request.num_output_placeholders = 0
            return False
        self._place_forwards([request], [False])
        return True

    def _has_room(self, request: Request, wanted: int, halves: int) -> bool:
        """Return whether a waiting conditional request can enter with its unconditional one."""
        if halves == 1 or request.status == RequestStatus.RUNNING:
            return True
        manager = self.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks()
        free -= manager.watermark_blocks
        slots = self.max_num_active_reqs - len(self.running)
        pages = halves * cdiv(wanted, self.block_size)
        return slots >= halves and free >= pages

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        """Mark the canvas of first forwards; none if only one request of a pair runs."""
        canvases = output.scheduled_spec_decode_tokens
        for data in output.scheduled_new_reqs:
            req_id = data.req_id
            self.in_flight.forget(req_id)
            num_tokens = self.requests[req_id].num_tokens
            num_drafts = output.num_scheduled_tokens[req_id] - num_tokens
            canvases[req_id] = self._placeholders[:num_drafts]
        for req_id in list(canvases) if self._unconditional else ():
            other = self._other_of_pair(req_id)
            if other is not None and other not in canvases:
                del canvases[req_id]
        requests = [self.requests[req_id] for req_id in canvases]
        self.in_flight.launch({r.request_id: _start_of(r) for r in requests})
        super()._update_after_schedule(output)
        for request in requests:
            request.num_output_placeholders = 0  # forwards differ in size
        if self.scheduler_config.async_scheduling and requests:
            self._place_forwards(requests, [True] * len(requests))

    def _update_request_with_output(
        self, request: Request, token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Update as vLLM's synchronous scheduler: no placeholders and no cached pages."""
        update = Scheduler._update_request_with_output
        return update(self, request, token_ids, is_stale)

    def update_from_output(
        self, output: SchedulerOutput, results: ModelRunnerOutput
    ) -> Outputs:
        """Update as vLLM does; then place next forwards, from what was committed."""
        left = unpack_masks_left(results)
        void = self._drop_void(output)
        outputs = super().update_from_output(output, results)
        places = results.req_id_to_index
        committed = results.sampled_token_ids
        going_on, in_block = [], []
        for req_id in output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is None or req_id in void:
                continue
            if request.status == RequestStatus.RUNNING:
                going_on.append(request)
                in_step = req_id in output.scheduled_spec_decode_tokens
                in_block.append(in_step and not committed[places[req_id]])
        if going_on:
            self._place_next_forwards(going_on, in_block, left)
        if self._given:
            self._send_given(outputs)
        return outputs

    def _send_given(self, outputs: Outputs) -> None:
        """Add given tokens to first outputs, and forget requests that are gone."""
        for of_client in outputs.values():
            for each in of_client.outputs:
                if each.request_id not in self._given or not each.new_token_ids:
                    continue
                given = self._given.pop(each.request_id)
                each.new_token_ids = [*given, *each.new_token_ids]
                if each.new_logprobs is not None:
                    each.new_logprobs = _with_certain(each.new_logprobs, given)
        for req_id in self._given.keys() - self.requests.keys():
            del self._given[req_id]

    def _drop_void(self, output: SchedulerOutput) -> set[str]:
        """Remove forwards of blocks that were done already from a step's results."""
        void = set()
        for req_id, start in self.in_flight.land().items():
            request = self.requests.get(req_id)
            if request is not None and request.num_tokens != start:
                void.add(req_id)
                del output.scheduled_spec_decode_tokens[req_id]
        self.in_flight.num_void += len(void)
        return void

    def _place_next_forwards(
        self, requests: list[Request], in_block: list[bool], left: dict[str, int]
    ) -> None:
        """Place the next forwards of requests, and record how far their blocks are.

        Args:
            in_block: whether the block of a request goes on.
            left: masked positions of blocks by request id; none for missing requests.
        """
        keeps_kv = []
        for request, goes_on in zip(requests, in_block, strict=True):
            req_id = request.request_id
            start = request.num_tokens
            # The refresh after a last step may be in flight already.
            launched = self.in_flight.count(req_id, start) > 0
            keeps_kv.append(goes_on or launched)
        self._place_forwards(requests, keeps_kv)
        for request, goes_on in zip(requests, in_block, strict=True):
            req_id = request.request_id
            if goes_on:
                self.in_flight.note(req_id, left.get(req_id, 0))
            else:
                size = self.records[req_id].spans.size
                self.in_flight.begin_block(req_id, size)

    def _place_forwards(self, requests: list[Request], keeps_kv: list[bool]) -> None:
        self._find_spans(requests)
        for request, keeps in zip(requests, keeps_kv, strict=True):
            spans = self.records[request.request_id].spans
            start, num_drafts = spans.of_block if keeps else spans.refresh
            request.num_computed_tokens = start
            request.spec_token_ids = self._placeholders[:num_drafts]

    def _find_spans(self, requests: list[Request]) -> None:
        """Find the spans of requests that have begun another block."""
        begun = []
        for request in requests:
            known = self.records[request.request_id].spans
            if known.start != _start_of(request):
                begun.append(request)
        if not begun:
            return
        canvas, forwards = self._bounds(begun), []
        for keeps_kv in (False, True):
            starts, stops = self.span(canvas, np.full(len(begun), keeps_kv))
            drafts = (stops - canvas.start).tolist()
            forwards.append(list(zip(starts.tolist(), drafts, strict=True)))
        refreshes, of_blocks = forwards
        starts = canvas.start.tolist()
        sizes = (canvas.block_stop - canvas.start).tolist()
        for i, request in enumerate(begun):
            spans = BlockSpans(starts[i], sizes[i], refreshes[i], of_blocks[i])
            self.records[request.request_id].spans = spans


def _start_of(request: Request) -> int:
    """Return where the canvas of a request's next forward is expected to start."""
    return int(request.num_tokens + request.num_output_placeholders)


def _with_certain(lists: LogprobsLists, token_ids: list[int]) -> LogprobsLists:
    """Prepend the log-probabilities of given tokens, which are certain."""
    shape = (len(token_ids), lists.logprobs.shape[1])
    ids = np.repeat(np.array(token_ids)[:, None], shape[1], axis=1)
    certain = (ids, np.zeros(shape), np.ones(shape[0]))
    columns = []
    for given, emitted in zip(certain, lists[:3], strict=True):
        given = given.astype(emitted.dtype)
        columns.append(np.concatenate([given, emitted]))
    return LogprobsLists(*columns)
