"""The scheduler of full-attention decoding: the host mirrors where the device's next span starts.

A request's first forward computes prompt and canvas in one pass, so its pages for both are
reserved by then or it waits. Later passes start where the strategy says. A pass that does not fit
the step's budget of tokens waits for the next step, for none may be cut.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.request import request_config
from dllm_plugin.decoding.full_attention import Bounds, bounds
from dllm_plugin.decoding.methods import SpanFunction
from dllm_plugin.engine.scheduler import DiffusionScheduler
from dllm_plugin.sampling.guidance import is_partner, leader_of, partner_of

logger = init_logger("vllm.dllm_plugin")


class RefreshScheduler(DiffusionScheduler):
    """Spans of different kinds, of different requests, in one step; synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        span = self.decode_config.method.span
        assert span is not None, "only full attention is scheduled here"
        self.span: SpanFunction = span
        self._placeholders = [-1] * self.num_spec_tokens
        self._left = 0  # tokens that this step may still compute
        self._guided: set[str] = set()  # guided requests that this step computes
        self._partners: set[str] = set()  # all hidden halves

    def _bound_requests(self) -> None:
        """Passes differ in size; each is weighed against the budget when it is scheduled."""

    def _bounds(self, requests: Sequence[Request]) -> Bounds:
        lengths = self.block_length
        table = [
            (r.num_prompt_tokens, r.num_tokens, r.max_tokens, lengths[r.request_id])
            for r in requests
        ]
        prompt_len, num_tokens, max_tokens, block_length = np.array(table, dtype=np.int64).T
        return bounds(
            prompt_len,
            num_tokens,
            np.minimum(prompt_len + max_tokens, self.max_model_len),
            block_length,
            self.decode_config.canvas_length,
            self.max_model_len,
        )

    # Requests come and go; a guided one brings its partner.

    def add_request(self, request: Request) -> None:
        """Admit a request, and behind it the hidden partner that guidance needs."""
        params = request.sampling_params
        assert params is not None
        super().add_request(request)
        asked = request_config(self.decode_config, params.extra_args, params.max_tokens)
        if asked.cfg_scale > 0 and not request.resumable:
            self._partners.add(partner_of(request.request_id))
            super().add_request(self._partner(request, params))

    def _partner(self, request: Request, params: SamplingParams) -> Request:
        """The unguided half: the same request; the runner feeds it masks for a prompt."""
        params = params.clone()
        params.logprobs = None
        return Request(
            request_id=partner_of(request.request_id),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            priority=request.priority,
        )

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """As vLLM's; partners end with their requests and are not reported."""
        if request_ids is not None:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            request_ids = [*ids, *(partner_of(i) for i in ids if partner_of(i) in self.requests)]
        finished = super().finish_requests(request_ids, finished_status)
        return [request for request in finished if not is_partner(request.request_id)]

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._partners.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    # One step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As vLLM's, in passes of the sizes that :meth:`_reserve_prefill_lookahead` returns."""
        self._left = self.max_num_scheduled_tokens
        self._guided.clear()
        self._reunite()
        return super().schedule(throttle_prefills)

    def _reunite(self) -> None:
        """Send a request back to wait if its other half is not running.

        Both halves hold pages; two lone ones could wait for each other's for ever.
        """
        if not self._partners:
            return
        running = {request.request_id for request in self.running}
        for request in list(self.running):
            other = self._other_half(request.request_id)
            if other is None or other in running:
                continue
            self.running.remove(request)
            self._preempt_request(request, request.arrival_time)
            if is_partner(request.request_id):
                # The leader waits in front of its partner, whichever came back first.
                leader = self.requests[other]
                self.waiting.remove_request(leader)
                self.waiting.prepend_request(leader)

    def _other_half(self, request_id: str) -> str | None:
        if is_partner(request_id):
            leader = leader_of(request_id)
            return leader if leader in self.requests else None
        partner = partner_of(request_id)
        return partner if partner in self._partners else None

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """How many tokens of a request to compute: its whole pass, or 0 to let it wait.

        vLLM asks here, running or waiting, between weighing the budget and reserving pages.
        """
        if request.status == RequestStatus.RUNNING:
            wanted = request.num_tokens_with_spec - num_computed_tokens
        else:
            wanted = int(self._bounds([request]).stop[0])
        if is_partner(request.request_id):
            # Its leader, right in front of it, has made room for both.
            return wanted if leader_of(request.request_id) in self._guided else 0
        halves = 1 if self._other_half(request.request_id) is None else 2
        if wanted * halves > self._left or not self._has_room(request, wanted, halves):
            return 0
        self._left -= wanted * halves
        if halves == 2:
            self._guided.add(request.request_id)
        return wanted

    def _has_room(self, request: Request, wanted: int, halves: int) -> bool:
        """Whether a waiting guided request can enter together with its partner."""
        if halves == 1 or request.status == RequestStatus.RUNNING:
            return True
        manager = self.kv_cache_manager
        free = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks
        slots = self.max_num_active_reqs - len(self.running)
        return slots >= halves and free >= halves * cdiv(wanted, self.block_size)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Say which positions of first passes are canvas; a lone half has none that count."""
        scheduled = scheduler_output.num_scheduled_tokens
        canvases = scheduler_output.scheduled_spec_decode_tokens
        for data in scheduler_output.scheduled_new_reqs:
            num_drafts = scheduled[data.req_id] - self.requests[data.req_id].num_tokens
            canvases[data.req_id] = self._placeholders[:num_drafts]
        for request_id in list(canvases) if self._partners else ():
            other = self._other_half(request_id)
            if other is not None and other not in canvases:
                del canvases[request_id]
        super()._update_after_schedule(scheduler_output)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        """As vLLM's; the tokens of a hidden partner are those of its request."""
        if is_partner(kwargs["request_id"]):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; then decide from what was committed where each next pass starts."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        known = (self.requests.get(i) for i in scheduler_output.num_scheduled_tokens)
        going_on = [r for r in known if r is not None and r.status == RequestStatus.RUNNING]
        if going_on:
            self._place_next_passes(going_on, scheduler_output, model_runner_output)
        for of_client in outputs.values():
            # A pair that ended in this step is no longer known, but its hidden half has an output.
            shown = [o for o in of_client.outputs if not is_partner(o.request_id)]
            of_client.outputs[:] = shown
        return outputs

    def _place_next_passes(
        self,
        requests: list[Request],
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        passes = scheduler_output.scheduled_spec_decode_tokens
        index = model_runner_output.req_id_to_index
        committed = model_runner_output.sampled_token_ids
        keeps_kv = [r.request_id in passes and not committed[index[r.request_id]] for r in requests]
        canvas = self._bounds(requests)
        starts, stops = self.span(canvas, np.array(keeps_kv))
        drafts = (stops - canvas.start).tolist()
        for request, start, num_drafts in zip(requests, starts.tolist(), drafts, strict=True):
            request.num_computed_tokens = start
            request.spec_token_ids = self._placeholders[:num_drafts]
