"""Schedule guided requests, each with a hidden unconditional request.

With classifier-free guidance a request is conditional. Its hidden unconditional request
is an ordinary request of vLLM's with pages of its own; both are computed in the same
steps, and only the conditional one is reported.

A block that is preempted starts again. So a request that was preempted becomes as urgent
as the most urgent one that ran then: more urgent requests cannot delay it for ever.
"""

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.config.worker_carriers import (
    is_unconditional,
    pack_unconditional,
    unpack_unconditional,
)

from .reporting import Outputs
from .scheduler import DiffusionScheduler


class GuidedScheduler(DiffusionScheduler):
    """Add, preempt and end the two requests of a pair together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unconditional: set[str] = set()  # ids of all hidden requests

    def add_request(self, request: Request) -> None:
        """Admit a request, and after it the unconditional request that guidance needs."""
        super().add_request(request)
        asked = self.records[request.request_id].asked
        if asked.cfg_scale > 0 and not request.resumable:
            # The same, but its prompt becomes masks; it copies what the conditional one decides.
            assert request.sampling_params is not None
            params = request.sampling_params.clone()
            params.logprobs = None
            params.structured_outputs = None
            hidden = Request(
                request_id=pack_unconditional(request.request_id),
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=params,
                pooling_params=None,
                client_index=request.client_index,
                arrival_time=request.arrival_time,
                lora_request=request.lora_request,
                priority=request.priority,
            )
            self._unconditional.add(hidden.request_id)
            super().add_request(hidden)

    def finish_requests(
        self, request_ids: Any, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish as vLLM does; hidden requests end with theirs and are not reported."""
        if request_ids is not None:
            if isinstance(request_ids, str):
                request_ids = [request_ids]
            request_ids = list(request_ids)
            for hidden in map(pack_unconditional, tuple(request_ids)):
                if hidden in self._unconditional:
                    request_ids.append(hidden)
        finished = super().finish_requests(request_ids, finished_status)
        return [each for each in finished if not is_unconditional(each.request_id)]

    def _forget(self, request: Request) -> None:
        self._unconditional.discard(request.request_id)
        super()._forget(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does, no pair of which only one request runs."""
        self._reunite()
        return super().schedule(throttle_prefills)

    def _reunite(self) -> None:
        """Send a request back to wait if the other request of its pair is not running.

        Both have pages: if only one ran, pairs could wait for each other's pages for ever.
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
        """Preempt as vLLM does; under priorities a request yields to more urgent requests once."""
        resets_caches = kwargs.get("drop_stale_output", False)
        if self.policy == SchedulingPolicy.PRIORITY and not resets_caches:
            self._make_urgent(request)
        super()._preempt_request(request, *args, **kwargs)

    def _make_urgent(self, request: Request) -> None:
        """Make a request, and the other request of its pair, as urgent as any that runs."""
        for running in self.running:
            request.priority = min(request.priority, running.priority)
        other_id = self._other_of_pair(request.request_id)
        if other_id is None:
            return
        other = self.requests[other_id]
        other.priority = request.priority
        if other in list(self.waiting):  # which is sorted by priority
            self.waiting.remove_request(other)
            self.waiting.add_request(other)

    def _other_of_pair(self, request_id: str) -> str | None:
        if not self._unconditional:
            return None
        if is_unconditional(request_id):
            conditional = unpack_unconditional(request_id)
            return conditional if conditional in self.requests else None
        unconditional = pack_unconditional(request_id)
        return unconditional if unconditional in self._unconditional else None

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        """Count as vLLM does; the tokens of a hidden request are those of its own."""
        if is_unconditional(kwargs["request_id"]):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **kwargs)

    def update_from_output(
        self, output: SchedulerOutput, results: ModelRunnerOutput
    ) -> Outputs:
        """Update as vLLM does, without outputs of hidden requests."""
        has_hidden = bool(self._unconditional)
        outputs = super().update_from_output(output, results)
        if not has_hidden:
            return outputs
        # vLLM itself ends a request if its grammar refuses the text.
        widowed = []
        for req_id in self._unconditional:
            if unpack_unconditional(req_id) not in self.requests:
                widowed.append(req_id)
        if widowed:
            self.finish_requests(widowed, RequestStatus.FINISHED_ABORTED)
        for of_client in outputs.values():
            shown = []
            for each in of_client.outputs:
                # Also of a pair that ended in this step, which is unknown by now.
                if not is_unconditional(each.request_id):
                    shown.append(each)
            of_client.outputs[:] = shown
        return outputs
