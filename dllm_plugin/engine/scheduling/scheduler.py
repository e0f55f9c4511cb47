"""Schedule requests that decode a canvas at a time, asynchronously as vLLM does.

Methods of vLLM's scheduler are overridden and call their parents.
`_reserve_prefill_lookahead` does here what its name does not say: vLLM asks it for every
running and waiting request how many tokens to compute, after it has checked the budget
and before it reserves pages.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm_plugin.config.carriers import drop_wrong_pages, pack_start
from dllm_plugin.config.request.arguments import GRAMMAR_MODES, Template
from dllm_plugin.config.scheduling import IN_PLACE
from dllm_plugin.config.validation import shown
from dllm_plugin.config.worker_carriers import pack_departures
from dllm_plugin.engine.platforms import end_with_error, end_with_parent

from .broken_requests import count_broken, end_broken
from .grammar_scheduler import GrammarScheduler
from .page_hashes import salt_pages, share_pages
from .reporting import Outputs

logger = init_logger("vllm.dllm_plugin")

BOUND = (
    "At most %d requests run at once: max_num_batched_tokens %d holds that many canvases "
    "of %d positions and a prompt."
)
STREAMING = (
    "diffusion decoding does not support streaming-input sessions; send the whole "
    "prompt at once."
)
FAILED = "Request %s ends with an error: %s"


class DiffusionScheduler(GrammarScheduler):
    """Schedule canvas positions as draft tokens; committed tokens are accepted drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Only the canvas is computed: no token is sampled after it.
        self.num_sampled_tokens_per_step = 0
        # Queries of all forwards, for `diffuplug eval`.
        self.num_computed_positions = 0
        # Requests that may come near the end of the context.
        self._long: set[str] = set()
        self._spare_tokens = 0
        self._single_blocks = False
        self._broken_pages: dict[str, tuple[int, ...]] = {}
        self._bound_requests()
        end_with_parent()

    def _bound_requests(self) -> None:
        # Every running request computes a whole canvas per step. A prompt must fit as well,
        # or a chunk of a prompt if it may be split.
        canvas = self.num_spec_tokens
        most = self.max_num_scheduled_tokens
        prompt = self.max_model_len
        if self.scheduler_config.enable_chunked_prefill:
            prompt = canvas
        fits = max(1, (most - prompt) // canvas)
        if fits < self.max_num_active_reqs:
            logger.info(BOUND, fits, most, canvas)
            self.max_num_active_reqs = fits

    def add_request(self, request: Request) -> None:
        """Admit a request: its block length, its pages and what ends it."""
        adapter = request.lora_request
        if request.resumable:
            # Only here vLLM shows that the prompt is a stream, and a scheduler may not raise:
            # this is vLLM's list of requests that end with an error.
            logger.error(FAILED, shown(request.request_id), STREAMING)
            end_with_error(self, request.request_id)
        if adapter is not None:
            # vLLM hashes its name and path, under which other weights may come.
            salt_pages(request, f"/adapter {adapter.lora_int_id}")
            if adapter.load_inplace:
                logger.error(FAILED, shown(request.request_id), IN_PLACE)
                end_with_error(self, request.request_id)
        drop_wrong_pages(request)
        config = self.decode_config
        asked = self.arguments_of(request)
        length = asked.block_length
        prompt_len = request.num_prompt_tokens
        # A canvas in flight, the canvas scheduled after it, and the canvas after both.
        reach = prompt_len + request.max_tokens + 3 * self.num_spec_tokens
        if reach > self.max_model_len:
            self._long.add(request.request_id)
        if length != config.block_length and not config.method.causal:
            # Keys depend on where blocks end, so other requests must not use these pages.
            salt_pages(request, f"/block {length}")
        if config.method.splits_prompt:
            origin = config.origin(prompt_len, length)
            share_pages(request, origin, self.block_size % length == 0)
        self._set_ends(request, asked.template)
        super().add_request(request)

    def _set_ends(self, request: Request, template: Template | None) -> None:
        """Set the tokens that end a request."""
        params = request.sampling_params
        config = self.decode_config
        assert params is not None
        stops = params.stop_token_ids or []
        ends = list(config.turn_end_token_ids)
        if template is not None:
            ends = template.ends(ends)
            stops = template.ends(stops)
            eos = params.eos_token_id
            if eos is not None and not template.ends([eos]):
                params._eos_token_id = None
        prompt = request.prompt_token_ids or ()
        # Chat models end a turn with a token that configs do not list as EOS. In a prompt
        # without turns it is an ordinary token.
        if not (params.ignore_eos or set(ends).isdisjoint(prompt)):
            stops = list(dict.fromkeys([*stops, *ends]))
        hidden = config.hidden_token_id
        params.stop_token_ids = stops if hidden is None else [*stops, hidden]

    def _forget(self, request: Request) -> None:
        self._long.discard(request.request_id)
        if self.connector is not None:
            # What is in flight counts as computed, and the last block was not stored.
            most = max(request.num_prompt_tokens, request.num_tokens - 1)
            stored = min(request.num_computed_tokens, most)
            request.num_computed_tokens = stored
        super()._forget(request)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Take loaded pages as vLLM does, which computes the last position of a prompt again.

        Here the whole last block: experts may be chosen by block.
        """
        super()._update_waiting_for_remote_kv(request)
        last = request.num_tokens - 1
        if request.num_computed_tokens != last:
            return
        length = self._length(request)
        request.num_computed_tokens = last // length * length
        if not request.num_computed_tokens:
            # vLLM would ask for the same page again.
            self.kv_cache_manager.free(request)
            request.skip_reading_prefix_cache = True

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule as vLLM does; the budget keeps a canvas for every running request."""
        running = len(self.running)
        reserved = running * self.num_spec_tokens
        self._spare_tokens = self.max_num_scheduled_tokens - reserved
        fewest = self.decode_config.commit_alone_from
        self._single_blocks = 0 < fewest <= cdiv(running, self.pp_size)
        most = self.max_num_active_reqs
        if self.pp_size > 1:
            self._share_among_steps()
        output = super().schedule(throttle_prefills)
        self.max_num_active_reqs = most
        pack_departures(output, self._broken_pages)
        return output

    def _share_among_steps(self) -> None:
        """Limit the requests that this step admits to its share.

        With stages of a pipeline a request is computed in every `pp_size`-th step, from the step
        that admits it. The stages work at the same time only if all steps have requests.
        """
        wanted = min(sum(self.get_request_counts()), self.max_num_active_reqs)
        here = 0
        step = self.current_step + 1  # vLLM counts it later
        for request in self.running:
            decodes = not request.is_prefill_chunk
            here += decodes and request.next_decode_eligible_step <= step
        free = max(0, cdiv(wanted, self.pp_size) - here)
        share = len(self.running) + free
        self.max_num_active_reqs = min(self.max_num_active_reqs, share)

    def _canvas_tokens(self, request: Request) -> int:
        """Return how many positions of a request's canvas this step computes.

        If many requests run, only the first block is computed, and the next block waits
        until the first is finished. Computing both saves a forward per block, but costs
        time if the GEMMs over all positions take most of it. What a step decides about the
        first block does not depend on it.
        """
        drafts = len(request.spec_token_ids) or self.num_spec_tokens
        length = self._length(request)
        rows = self.decode_config.method.rows
        if rows is not None:
            return min(drafts, rows(length))
        if self._single_blocks and request.status == RequestStatus.RUNNING:
            return min(drafts, length)
        return drafts

    def _reserve_prefill_lookahead(self, request: Request, start: int, new: int) -> int:
        """Return how many tokens of a request to compute, 0 to let it wait.

        A request that must wait stops the queue after it: other requests would overtake it
        for ever, and vLLM 0.33 would ask for each of ten thousand in every step.
        """
        wanted = self._tokens_to_compute(request, start, new)
        if not wanted and request.status != RequestStatus.RUNNING:
            self.max_num_active_reqs = 0  # until the end of this step
        return wanted

    def _tokens_to_compute(self, request: Request, start: int, new: int) -> int:
        """Return how many tokens of a request fit this step.

        If blocks divide the prompt, a prefill that does not fit the step is cut at the end
        of a block, so that later canvases are whole. On an absolute grid the first canvas
        begins inside the prompt, with its partial block; vLLM counts the prompt as
        computed, and would cut that canvas at the end of the context.

        Args:
            start: tokens that are computed already.
            new: tokens that vLLM would compute.
        """
        known = request.num_tokens
        prompt_len = request.num_prompt_tokens
        config = self.decode_config
        canvas = self.num_spec_tokens
        cuts = self._single_blocks or config.method.causal_rows
        if cuts and request.spec_token_ids:
            end = known + request.num_output_placeholders
            new = min(new, end - start + self._canvas_tokens(request))
        if not (config.prompt_has_blocks and new):
            return new
        if request.status == RequestStatus.RUNNING and start < known:
            new = min(new, canvas + self._spare_tokens)
            self._spare_tokens -= max(0, new - canvas)
        if start + new < known:
            length = self._length(request)
            origin = config.origin(prompt_len, length)
            end = origin + (start + new - origin) // length * length
            return max(0, end - start)
        # A text that comes back is prefilled whole: a canvas may end inside a block.
        if known > prompt_len or start != prompt_len:
            return new
        wanted = new + self._first_tail(request)
        return min(wanted, self._canvas_tokens(request))

    def _first_tail(self, request: Request) -> int:
        """Return how many positions of the prompt the first canvas begins with."""
        length = self._length(request)
        prompt_len = request.num_prompt_tokens
        origin = self.decode_config.origin(prompt_len, length)
        return (prompt_len - origin) % length

    def _length(self, request: Request) -> int:
        """Return the positions of a request's block."""
        return self.records[request.request_id].length

    def _update_request_with_output(
        self, request: Request, token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Update as vLLM does, but do not cache the last block, which was not stored yet.

        vLLM 0.32 caches pages in this method, vLLM 0.33 after it: neither caches tokens that
        are subtracted here.
        """
        update = super()._update_request_with_output
        manager = self.kv_cache_manager
        was_running = request.status == RequestStatus.RUNNING
        if is_stale or not (was_running and manager.enable_caching):
            return update(request, token_ids, is_stale)
        num_new = len(token_ids)
        request.num_computed_tokens -= num_new
        token_ids, stopped = update(request, token_ids)
        if not stopped:
            request.num_computed_tokens += num_new
            in_flight = request.num_output_placeholders
            computed = request.num_computed_tokens - in_flight
            manager.cache_blocks(request, computed)
        return token_ids, stopped

    def update_from_output(
        self, output: SchedulerOutput, results: ModelRunnerOutput
    ) -> Outputs:
        """Update as vLLM does; requests whose logits are no numbers end with an error."""
        broken = end_broken(self, results, self._broken_pages)
        outputs = super().update_from_output(output, results)
        count_broken(broken, outputs)
        return outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset vLLM's prefix cache.

        Beside a step in flight, which a paused server does not have, running requests go on:
        vLLM would drop that step, which has already advanced their canvases. If requests share
        no pages, no page needs protection.
        """
        in_flight = any(request.num_in_flight_tokens for request in self.running)
        preempts = reset_running_requests and not in_flight
        done = super().reset_prefix_cache(preempts, reset_connector)
        share = self.kv_cache_manager.enable_caching or self.connector is not None
        return done or (reset_running_requests and not share)

    def _record_start(self, req_id: str, cached_tokens: int) -> None:
        """Record with a request's counts what was cached, and the mode of its grammar."""
        mode = self.grammar_mode(req_id)
        grammar = None if mode is None else GRAMMAR_MODES.index(mode)
        pack_start(self.records[req_id].counts, cached_tokens, grammar)

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        super()._update_after_schedule(output)
        for data in output.scheduled_new_reqs:
            self._record_start(data.req_id, data.num_computed_tokens)
        self.num_computed_positions += output.total_num_scheduled_tokens
        if not self.scheduler_config.async_scheduling:
            return
        steps = self.vllm_config.max_concurrent_batches
        # If it were scheduled before this step's commit is known, the next canvas would be cut
        # at the end of the context, even if the request has not advanced.
        last = self.max_model_len - self.num_spec_tokens
        for req_id in output.num_scheduled_tokens.keys() & self._long:
            request = self.requests[req_id]
            if request.num_computed_tokens > last:
                request.next_decode_eligible_step = self.current_step + steps
