"""Schedule requests that decode a canvas at a time, asynchronously as vLLM does.

Methods of vLLM's scheduler are overridden and call their parents. `_reserve_prefill_lookahead` is
used for something else than its name says: vLLM asks it, for running and waiting requests alike,
how many tokens to compute, after weighing the budget and before reserving pages.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm_plugin.config.request.arguments import request_config
from dllm_plugin.config.request.grammar_mode import WAYS
from dllm_plugin.config.request.template import template_of
from dllm_plugin.config.validation import shown
from dllm_plugin.engine.scheduling.broken_requests import BrokenRequests
from dllm_plugin.engine.scheduling.grammar_scheduler import GrammarScheduler
from dllm_plugin.engine.scheduling.reporting import ReportingScheduler, RequestCounts
from dllm_plugin.engine.vllm_versions import end_with_error
from dllm_plugin.state.preempted import FinishedId, PreemptedId

logger = init_logger("vllm.dllm_plugin")


def _mark_removed(output: SchedulerOutput) -> None:
    """Tell workers which of the requests that this step removes were only preempted."""
    finished, preempted = output.finished_req_ids, output.preempted_req_ids
    if preempted:
        # Between two steps a request can be preempted and then aborted.
        output.preempted_req_ids = {PreemptedId(i) for i in preempted - finished}
    if finished:
        output.finished_req_ids = {FinishedId(i) for i in finished}


class DiffusionScheduler(ReportingScheduler, GrammarScheduler):
    """Schedule canvas positions as draft tokens; committed tokens are accepted drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The canvas alone is computed: no token is sampled behind it.
        self.num_sampled_tokens_per_step = 0
        self.num_computed_positions = 0  # queries of all forwards, for `diffuplug eval`
        self._long: set[str] = (
            set()
        )  # requests that may come near the end of the context
        self._spare_tokens = 0
        self._single_blocks = False
        self.broken = BrokenRequests(self)
        self._bound_requests()

    def _bound_requests(self) -> None:
        # Every running request computes a whole canvas per step; a prompt, or a chunk of one where
        # it may be split, must fit as well.
        chunked = self.scheduler_config.enable_chunked_prefill
        prompt = self.num_spec_tokens if chunked else self.max_model_len
        room = self.max_num_scheduled_tokens - prompt
        fits = max(1, room // self.num_spec_tokens)
        if fits < self.max_num_active_reqs:
            logger.info(
                "At most %d requests run at once: max_num_batched_tokens %d holds that many "
                "canvases of %d positions and a prompt.",
                fits,
                self.max_num_scheduled_tokens,
                self.num_spec_tokens,
            )
            self.max_num_active_reqs = fits

    def add_request(self, request: Request) -> None:
        """Admit a request: its block length, its pages and what ends it."""
        if request.resumable:
            # vLLM tells only here that the prompt is a stream, and a scheduler may not raise:
            # this is its list of requests that end with an error.
            logger.error(
                "Request %s ends with an error: diffusion decoding does not support "
                "streaming-input sessions; send the whole prompt at once.",
                shown(request.request_id),
            )
            end_with_error(self, request.request_id)
        params = request.sampling_params
        assert params is not None
        config = request_config(
            self.decode_config, params.extra_args, params.max_tokens
        )
        self.block_length[request.request_id] = config.block_length
        # A canvas in flight, the one scheduled behind it, and the next.
        reach = (
            request.num_prompt_tokens + request.max_tokens + 3 * self.num_spec_tokens
        )
        if reach > self.max_model_len:
            self._long.add(request.request_id)
        if config.block_length != self.decode_config.block_length:
            # Keys depend on where blocks end, so these pages are no one else's.
            request.cache_salt = (
                f"{request.cache_salt or ''}/block {config.block_length}"
            )
            request.block_hashes.clear()
            request.update_block_hashes()
        ends = list(self.decode_config.turn_end_token_ids)
        template = template_of(params.extra_args)
        if template is not None:
            ends = template.ends(ends)
            params.stop_token_ids = template.ends(params.stop_token_ids or [])
            if params.eos_token_id is not None and not template.ends(
                [params.eos_token_id]
            ):
                params._eos_token_id = None
        if not params.ignore_eos:
            # Chat models end a turn with a token of their own that configs do not list as EOS;
            # in a prompt without turns it is a token like any other.
            known, prompt = params.stop_token_ids or [], request.prompt_token_ids or ()
            if any(i in prompt for i in ends):
                params.stop_token_ids = [*known, *(i for i in ends if i not in known)]
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.block_length.pop(request.request_id, None)
        self._long.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does, keeping a canvas of the budget free for every running request."""
        reserved = len(self.running) * self.num_spec_tokens
        self._spare_tokens = self.max_num_scheduled_tokens - reserved
        fewest = self.decode_config.commit_alone_from
        self._single_blocks = 0 < fewest <= len(self.running)
        most = self.max_num_active_reqs
        output = super().schedule(throttle_prefills)
        self.max_num_active_reqs = most
        _mark_removed(output)
        self.broken.mark(output)
        return output

    def _canvas_tokens(self, request: Request) -> int:
        """Return how many positions of a request's canvas this step computes.

        Where many requests run, the first block alone. The block behind it waits for the first to
        be finished: to compute both saves a forward per block, and costs where the GEMMs over all
        positions are what takes the time. What a step decides about the first block does not
        depend on it.
        """
        drafts = len(request.spec_token_ids) or self.num_spec_tokens
        if not (self._single_blocks and request.status == RequestStatus.RUNNING):
            return drafts
        return min(drafts, self.block_length[request.request_id])

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens of a request to compute, 0 to let it wait.

        One that waits holds up those behind it: they would overtake it for ever, and vLLM 0.33
        would ask for each of ten thousand in every step.
        """
        wanted = self._tokens_to_compute(request, num_computed_tokens, num_new_tokens)
        if not wanted and request.status != RequestStatus.RUNNING:
            self.max_num_active_reqs = 0  # until the end of this step
        return wanted

    def _tokens_to_compute(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens of a request fit this step.

        On an absolute grid a prefill that does not fit the step is cut at the end of a block, and
        leaves the canvases behind it whole. And the first canvas begins inside the prompt, with
        its partial block; vLLM, which counts the prompt as computed, would cut that canvas where
        the context ends.
        """
        if self._single_blocks and request.spec_token_ids:
            in_flight = request.num_output_placeholders - num_computed_tokens
            most = request.num_tokens + in_flight + self._canvas_tokens(request)
            num_new_tokens = min(num_new_tokens, most)
        if not (self.decode_config.family.absolute_grid and num_new_tokens):
            return num_new_tokens
        if (
            request.status == RequestStatus.RUNNING
            and num_computed_tokens < request.num_tokens
        ):
            num_new_tokens = min(
                num_new_tokens, self.num_spec_tokens + self._spare_tokens
            )
            self._spare_tokens -= max(0, num_new_tokens - self.num_spec_tokens)
        end = num_computed_tokens + num_new_tokens
        if end < request.num_tokens:
            whole = end // self.block_length[request.request_id]
            end = whole * self.block_length[request.request_id]
            return max(0, end - num_computed_tokens)
        # A text that comes back is prefilled whole: a canvas may end inside a block.
        comes_back = request.num_tokens > request.num_prompt_tokens
        if comes_back or num_computed_tokens != request.num_prompt_tokens:
            return num_new_tokens
        return min(
            num_new_tokens + self._first_tail(request), self._canvas_tokens(request)
        )

    def _first_tail(self, request: Request) -> int:
        """Return how many positions of the prompt the first canvas begins with."""
        return request.num_prompt_tokens % self.block_length[request.request_id]

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Do as vLLM, but do not cache what ends a request: its block was not stored yet.

        vLLM 0.32 caches pages in here, a later one behind it: neither counts what stays taken off.
        """
        was_running, num_new = (
            request.status == RequestStatus.RUNNING,
            len(new_token_ids),
        )
        if is_stale or not (was_running and self.kv_cache_manager.enable_caching):
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        request.num_computed_tokens -= num_new
        new_token_ids, stopped = super()._update_request_with_output(
            request, new_token_ids
        )
        if not stopped:
            request.num_computed_tokens += num_new
            computed = request.num_computed_tokens - request.num_output_placeholders
            self.kv_cache_manager.cache_blocks(request, computed)
        return new_token_ids, stopped

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as vLLM does; requests whose logits are no numbers end with an error."""
        broken = self.broken.end(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.broken.count(broken, outputs)
        return outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset vLLM's prefix cache.

        Under asynchronous scheduling running requests go on: vLLM would drop the step in flight,
        which has moved their canvases on already. Without a cache there is no page to protect.
        """
        preempts = reset_running_requests and not self.scheduler_config.async_scheduling
        done = super().reset_prefix_cache(preempts, reset_connector)
        return done or (
            reset_running_requests and not self.kv_cache_manager.enable_caching
        )

    def _note_start(
        self, request_id: str, counts: RequestCounts, num_tokens: int
    ) -> None:
        """Note also how a request keeps to its grammar."""
        is_new = not counts.per_step_drafted
        super()._note_start(request_id, counts, num_tokens)
        way = self.grammar_way(request_id)
        if is_new and way is not None:
            counts.per_step_drafted.append(WAYS.index(way))

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        self.num_computed_positions += scheduler_output.total_num_scheduled_tokens
        if not self.scheduler_config.async_scheduling:
            return
        for req_id in scheduler_output.num_scheduled_tokens.keys() & self._long:
            request = self.requests[req_id]
            # Scheduled before this step's commit is known, the next canvas would be cut at the
            # end of the context although the request may not have moved: wait for the result.
            if request.num_computed_tokens + self.num_spec_tokens > self.max_model_len:
                request.next_decode_eligible_step = self.current_step + 2
