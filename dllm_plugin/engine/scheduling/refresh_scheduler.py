"""Schedule full attention: the host knows where the next forward of each request starts.

A request's first forward computes prompt and canvas, so its pages for both are reserved by then or
it waits. Later forwards start where the strategy says. One that does not fit the step's budget of
tokens waits for the next step, for none may be cut.

A block that is preempted starts again. So that a stream of more urgent requests cannot hold another
one up for ever, a request that was preempted is as urgent as the most urgent one that ran then.

With classifier-free guidance a request is conditional, and has a hidden unconditional request.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.decode import RequestConfig
from dllm_plugin.config.request.arguments import request_config
from dllm_plugin.config.request.template import Template, template_of
from dllm_plugin.decoding.full_attention import (
    NO_TEMPLATE,
    Bounds,
    Layout,
    bounds,
    limit,
)
from dllm_plugin.decoding.methods import SpanFunction
from dllm_plugin.engine.scheduling.forwards_in_flight import (
    BlockSpans,
    ForwardsInFlight,
    take_left,
)
from dllm_plugin.engine.scheduling.given_starts import GivenStarts
from dllm_plugin.engine.scheduling.scheduler import DiffusionScheduler
from dllm_plugin.sampling.guidance import (
    conditional_id,
    is_unconditional,
    unconditional_id,
)

logger = init_logger("vllm.dllm_plugin")
UNKNOWN = 0  # steps of blocks whose last step may leave something


class RefreshScheduler(DiffusionScheduler):
    """Schedule refreshes and cached forwards of different requests in one step.

    Asynchronously, forwards of a block are launched before the result of the one before is known,
    see :mod:`dllm_plugin.engine.scheduling.forwards_in_flight`. A refresh waits for that result,
    unless a step in flight takes all that its block has left: launched for nothing, a refresh would
    spoil keys.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        span = self.decode_config.method.span
        assert span is not None, "only full attention is scheduled here"
        self.span: SpanFunction = span
        self._placeholders = [-1] * self.num_spec_tokens
        self._left = 0  # tokens that this step may still compute
        self._guided: set[str] = set()  # conditional requests that this step computes
        self._unconditional: set[str] = set()  # all hidden requests
        self._layouts: dict[
            str, tuple[int, ...]
        ] = {}  # fields of `Layout`, of each request
        self._steps: dict[str, int] = {}  # that a block of each request takes at most
        self._spans: dict[str, BlockSpans] = {}
        self._given_starts = GivenStarts()
        self.in_flight = ForwardsInFlight()

    def _bound_requests(self) -> None:
        """Do nothing: forwards differ in size, and each is weighed when it is scheduled."""

    def _bounds(self, requests: Sequence[Request]) -> Bounds:
        layouts = np.array(
            [self._layouts[r.request_id] for r in requests], dtype=np.int64
        )
        start = np.array([_start_of(r) for r in requests], dtype=np.int64)
        canvas_length = self.decode_config.canvas_length
        return bounds(Layout(*layouts.T), start, canvas_length, self.max_model_len)

    # Requests come and go; a conditional one brings its unconditional request.

    def add_request(self, request: Request) -> None:
        """Admit a request, and behind it the unconditional request that guidance needs."""
        params = request.sampling_params
        assert params is not None
        asked = request_config(self.decode_config, params.extra_args, params.max_tokens)
        template = template_of(params.extra_args)
        super().add_request(request)
        # No canvas is cut at the end of the context: the next one is placed behind its result.
        self._long.discard(request.request_id)
        self._lay_out(request, asked, template)
        if template is not None:
            self._begin_behind(request, template.given_blocks(asked.block_length))
        if asked.cfg_scale > 0 and not request.resumable:
            self._unconditional.add(unconditional_id(request.request_id))
            hidden = self._hidden_request(request, params)
            super().add_request(hidden)
            self._long.discard(hidden.request_id)
            self._lay_out(hidden, asked)

    def _begin_behind(self, request: Request, given: list[int]) -> None:
        if given:
            self._given_starts.add(request, given)
            if request.request_id in self._watches:
                self._watches[request.request_id].sent = len(given)

    def _lay_out(
        self, request: Request, asked: RequestConfig, template: Template | None = None
    ) -> None:
        end = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        policy = self.decode_config.method.policies[asked.policy]
        assert request.sampling_params is not None
        # Bad words take positions back behind the policy, in the last step as well.
        knows_last = (
            policy.takes_rest and not request.sampling_params.bad_words_token_ids
        )
        self._steps[request.request_id] = asked.steps if knows_last else UNKNOWN
        self._layouts[request.request_id] = (
            request.num_prompt_tokens,
            end,
            asked.block_length,
            asked.full_refresh_every,
            limit(asked.refresh_before),
            limit(asked.suffix_window),
            NO_TEMPLATE if template is None else template.tail,
        )

    def _hidden_request(self, request: Request, params: SamplingParams) -> Request:
        """Return the unconditional request: the same, but its prompt becomes masks."""
        params = params.clone()
        params.logprobs = None
        params.structured_outputs = None  # it copies what the conditional one decides
        return Request(
            request_id=unconditional_id(request.request_id),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            priority=request.priority,
        )

    def finish_requests(
        self, request_ids: Any, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish as vLLM does; hidden requests end with theirs and are not reported."""
        if request_ids is not None:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            hidden = map(unconditional_id, ids)
            request_ids = [*ids, *(i for i in hidden if i in self.requests)]
        finished = super().finish_requests(request_ids, finished_status)
        return [
            request for request in finished if not is_unconditional(request.request_id)
        ]

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._unconditional.discard(request.request_id)
        self._layouts.pop(request.request_id, None)
        self._steps.pop(request.request_id, None)
        self._spans.pop(request.request_id, None)
        self.in_flight.forget(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    # One step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does, in forwards as :meth:`_tokens_to_compute` sizes them."""
        self._left = self.max_num_scheduled_tokens
        self._guided.clear()
        self._reunite()
        return super().schedule(throttle_prefills)

    def _reunite(self) -> None:
        """Send a request back to wait if the other one of its pair is not running.

        Both hold pages; alone they could wait for each other's for ever.
        """
        if not self._unconditional:
            return
        running = {request.request_id for request in self.running}
        for request in list(self.running):
            other = self._other_of_pair(request.request_id)
            if other is None or other in running:
                continue
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            if is_unconditional(request.request_id):
                # The conditional one waits in front, whichever came back first.
                conditional = self.requests[other]
                self.waiting.remove_request(conditional)
                self.waiting.prepend_request(conditional)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempt as vLLM does; under priorities a request yields to more urgent ones once."""
        resets_caches = kwargs.get("drop_stale_output", False)
        if self.policy == SchedulingPolicy.PRIORITY and not resets_caches:
            self._make_urgent(request)
        super()._preempt_request(request, *args, **kwargs)

    def _make_urgent(self, request: Request) -> None:
        """Make a request, and the other one of its pair, as urgent as any that runs."""
        request.priority = min([request.priority, *(r.priority for r in self.running)])
        other = self.requests.get(self._other_of_pair(request.request_id) or "")
        if other is None:
            return
        other.priority = request.priority
        if other in list(self.waiting):  # which is sorted by priority
            self.waiting.remove_request(other)
            self.waiting.add_request(other)

    def _other_of_pair(self, request_id: str) -> str | None:
        if is_unconditional(request_id):
            conditional = conditional_id(request_id)
            return conditional if conditional in self.requests else None
        unconditional = unconditional_id(request_id)
        return unconditional if unconditional in self._unconditional else None

    def _tokens_to_compute(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens of a request to compute: its whole forward, or 0."""
        if request.status == RequestStatus.RUNNING:
            if not self._prepare_forward(request):
                return 0
            wanted = (
                _start_of(request)
                + len(request.spec_token_ids)
                - request.num_computed_tokens
            )
        else:
            wanted = int(self._bounds([request]).stop[0])
        if is_unconditional(request.request_id):
            # The conditional one, right in front of it, has made room for both.
            return wanted if conditional_id(request.request_id) in self._guided else 0
        halves = 1 if self._other_of_pair(request.request_id) is None else 2
        if wanted * halves > self._left or not self._has_room(request, wanted, halves):
            return 0
        self._left -= wanted * halves
        if halves == 2:
            self._guided.add(request.request_id)
        return wanted

    def _prepare_forward(self, request: Request) -> bool:
        """Prepare a request's next forward, unless it depends on a result that is not known yet."""
        request_id, start = request.request_id, request.num_tokens
        if not self.in_flight.count(request_id, start):
            return True
        # These are told, or checked, step by step; of a pair, half may turn out to have no room.
        by_step = request_id in self._watches or request_id in self._with_grammar
        by_step |= self._other_of_pair(request_id) is not None
        _, _, block_length, every, before, _, tail = self._layouts[request_id]
        # A void forward lies where the next refresh starts: inside of what is reserved, it must.
        may_overshoot = every > 1 and before < block_length
        if by_step or may_overshoot or tail != NO_TEMPLATE:
            return False
        if self.in_flight.is_last(request_id, start, self._steps[request_id]):
            return self._go_on_behind(request)
        return self.in_flight.expects_another(request_id, start)

    def _go_on_behind(self, request: Request) -> bool:
        """Place a request behind its block, which ends with what is in flight, if it goes on there.

        What the block commits counts as placeholders, as vLLM counts what it has not seen yet.
        """
        self._find_spans([request])
        size = self._spans[request.request_id].size
        behind = request.num_tokens + size
        end = self._layouts[request.request_id][1]
        if behind >= end or self.in_flight.count(request.request_id, behind):
            return False
        request.num_output_placeholders = size
        self._find_spans([request])
        start, num_drafts = self._spans[request.request_id].refresh
        if behind + num_drafts - start > self._left:
            request.num_output_placeholders = 0
            return False
        self._place_forwards([request], [False])
        return True

    def _has_room(self, request: Request, wanted: int, halves: int) -> bool:
        """Return whether a waiting conditional request can enter with its unconditional one."""
        if halves == 1 or request.status == RequestStatus.RUNNING:
            return True
        manager = self.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks
        slots = self.max_num_active_reqs - len(self.running)
        return slots >= halves and free >= halves * cdiv(wanted, self.block_size)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Say which positions of first forwards are canvas; of half a pair none are."""
        scheduled = scheduler_output.num_scheduled_tokens
        canvases = scheduler_output.scheduled_spec_decode_tokens
        for data in scheduler_output.scheduled_new_reqs:
            self.in_flight.forget(data.req_id)
            num_drafts = scheduled[data.req_id] - self.requests[data.req_id].num_tokens
            canvases[data.req_id] = self._placeholders[:num_drafts]
        for request_id in list(canvases) if self._unconditional else ():
            other = self._other_of_pair(request_id)
            if other is not None and other not in canvases:
                del canvases[request_id]
        self.in_flight.launch({i: _start_of(self.requests[i]) for i in canvases})
        super()._update_after_schedule(scheduler_output)
        requests = [self.requests[request_id] for request_id in canvases]
        for request in requests:
            request.num_output_placeholders = (
                0  # of no use where forwards differ in size
            )
        if self.scheduler_config.async_scheduling and requests:
            self._place_forwards(requests, [True] * len(requests))

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Do as vLLM's synchronous scheduler: there are neither placeholders nor cached pages."""
        return Scheduler._update_request_with_output(
            self, request, new_token_ids, is_stale
        )

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        """Count as vLLM does; the tokens of a hidden request are those of its own."""
        if is_unconditional(kwargs["request_id"]):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as vLLM does; then decide from what was committed where next forwards start."""
        left = take_left(model_runner_output)
        void = self._drop_void(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # vLLM ends a request whose text its grammar refuses by itself: the hidden one goes along.
        left_alone = [
            i for i in self._unconditional if conditional_id(i) not in self.requests
        ]
        if left_alone:
            self.finish_requests(left_alone, RequestStatus.FINISHED_ABORTED)
        known = (
            self.requests.get(i)
            for i in scheduler_output.num_scheduled_tokens
            if i not in void
        )
        going_on = [
            r for r in known if r is not None and r.status == RequestStatus.RUNNING
        ]
        if going_on:
            self._place_next_forwards(
                going_on, scheduler_output, model_runner_output, left
            )
        self._given_starts.put(outputs, self.requests)
        for of_client in outputs.values():
            # A pair that ended in this step is unknown by now, but its hidden one has an output.
            shown = [o for o in of_client.outputs if not is_unconditional(o.request_id)]
            of_client.outputs[:] = shown
        return outputs

    def _drop_void(self, scheduler_output: SchedulerOutput) -> set[str]:
        """Take forwards that were launched for a block that is done out of a step's results."""
        launched, requests = self.in_flight.land(), self.requests
        void = {
            i
            for i, at in launched.items()
            if i in requests and requests[i].num_tokens != at
        }
        for request_id in void:
            del scheduler_output.scheduled_spec_decode_tokens[request_id]
        self.in_flight.num_void += len(void)
        return void

    def _place_next_forwards(
        self,
        requests: list[Request],
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        left: dict[str, int],
    ) -> None:
        canvases = scheduler_output.scheduled_spec_decode_tokens
        index = model_runner_output.req_id_to_index
        committed = model_runner_output.sampled_token_ids
        in_block = [
            r.request_id in canvases and not committed[index[r.request_id]]
            for r in requests
        ]
        # The refresh behind a last step may be in flight already.
        ahead = [self.in_flight.count(r.request_id, r.num_tokens) > 0 for r in requests]
        self._place_forwards(
            requests, [a or b for a, b in zip(in_block, ahead, strict=True)]
        )
        for request, goes_on in zip(requests, in_block, strict=True):
            if goes_on:
                self.in_flight.note(request.request_id, left.get(request.request_id, 0))
            else:
                size = self._spans[request.request_id].size
                self.in_flight.begin_block(request.request_id, size)

    def _place_forwards(self, requests: list[Request], keeps_kv: list[bool]) -> None:
        self._find_spans(requests)
        for request, keeps in zip(requests, keeps_kv, strict=True):
            spans = self._spans[request.request_id]
            start, num_drafts = spans.of_block if keeps else spans.refresh
            request.num_computed_tokens = start
            request.spec_token_ids = self._placeholders[:num_drafts]

    def _find_spans(self, requests: list[Request]) -> None:
        """Find the spans of requests that have begun another block."""
        spans = ((request, self._spans.get(request.request_id)) for request in requests)
        begun = [
            r for r, known in spans if known is None or known.start != _start_of(r)
        ]
        if not begun:
            return
        canvas, forwards = self._bounds(begun), []
        for keeps_kv in (False, True):
            starts, stops = self.span(canvas, np.full(len(begun), keeps_kv))
            drafts = stops - canvas.start
            forwards.append(list(zip(starts.tolist(), drafts.tolist(), strict=True)))
        starts, sizes = (
            canvas.start.tolist(),
            (canvas.block_stop - canvas.start).tolist(),
        )
        columns = zip(begun, starts, sizes, *forwards, strict=True)
        for request, *fields in columns:
            self._spans[request.request_id] = BlockSpans(*fields)


def _start_of(request: Request) -> int:
    """Return where a request's next forward takes its canvas to start."""
    return int(request.num_tokens + request.num_output_placeholders)
