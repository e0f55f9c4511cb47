"""Extend vLLM's schedulers by one change each, and check requests for hidden states."""

from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsProcessor as LogitsProcessorV2,
)

from . import WANTED


class HiddenStatesScheduler(Scheduler):
    """Send hidden states to the front end as ``EngineCoreOutput.routed_experts``.

    vLLM joins them over the steps of a request. The instance is asynchronous if the engine's
    scheduling is.
    """

    def __new__(
        cls, vllm_config: Any, *args: Any, **kwargs: Any
    ) -> "HiddenStatesScheduler":
        overlapped = vllm_config.scheduler_config.async_scheduling
        return object.__new__(_AsyncHiddenStatesScheduler if overlapped else cls)

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        """Update as vLLM does, and add rows of the tokens that an output has."""
        due = model_runner_output.pooler_output or []
        model_runner_output.pooler_output = None
        rows = {}
        for place, tensor in enumerate(due):
            # A stop removes accepted draft tokens in place, so count the sampled tokens first.
            count = len(model_runner_output.sampled_token_ids[place])
            rows[model_runner_output.req_ids[place]] = tensor, count
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            for output in client.outputs:
                tensor, count = rows.get(output.request_id, (None, 0))
                if tensor is not None and output.new_token_ids:
                    kept = len(tensor) - (count - len(output.new_token_ids))
                    output.routed_experts = tensor[:kept].float().numpy()
        return outputs


class _AsyncHiddenStatesScheduler(HiddenStatesScheduler, AsyncScheduler):
    """Send hidden states on vLLM's asynchronous scheduler."""


class PipelineScheduler(Scheduler):
    """Schedule an image request in every step until it has its images.

    Until then the last token of its prompt counts as not computed. So each step of the engine
    is one denoising step.
    """

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        """Update as vLLM does, and have running requests compute their last token again."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and request.status == RequestStatus.RUNNING:
                request.num_computed_tokens = request.num_tokens - 1
        return outputs


class HiddenStatesRules(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]
    """Check requests in the front end, for both model runners.

    In a worker it would cost time in every step and exclude drafts on model runner v1, so
    ARWorker removes it there.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request whose hidden states could not be returned."""
        given = sampling_params.extra_args or {}
        if given.get(WANTED, False) not in (True, False):  # HTTP has 0 and 1 as well
            raise ValueError(f"{WANTED} must be true or false, got {given[WANTED]!r}.")
        if given.get(WANTED) and sampling_params.output_kind == RequestOutputKind.DELTA:
            raise ValueError(
                f"{WANTED} does not go with output_kind=DELTA, whose last output has not all "
                "tokens: use CUMULATIVE or FINAL_ONLY; over HTTP, no stream."
            )
        if "hidden_state_layers" in given:
            layers = given["hidden_state_layers"]
            raise ValueError(
                f"hidden_state_layers={layers} is the engine's to choose: start it with "
                "hidden_state_args(layers=...)."
            )
