"""Return hidden states from vLLM's model runners, for requests that ask.

A request with N known tokens gets positions ``[start, N - 1)``; rows of prompt chunks wait for
the step that samples.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.outputs import AsyncModelRunnerOutput

from . import WANTED, Runner, option, refuse


@dataclass
class Life:
    """Collect the rows of one request until it ends or is preempted; resuming starts anew."""

    computed: int  # next position to compute, after the last step whose result is known
    sent: int  # positions below it were sent, now or before a preemption
    # Rows of prompt chunks, on the host.
    pending: list[torch.Tensor] = field(default_factory=list)

    def take(self, rows: torch.Tensor, num_sampled: int) -> torch.Tensor | None:
        """Add one step's valid rows; return all rows to send, None if the step did not sample."""
        recomputed = max(0, self.sent - self.computed)  # after a preemption
        self.computed += len(rows)
        self.pending.append(rows[recomputed:])
        if not num_sampled:
            return None
        # A copy: a view would be sent with its whole storage.
        to_send = torch.cat(self.pending)
        self.pending, self.sent = [], self.computed
        return to_send


class StepRows(AsyncModelRunnerOutput):
    """Store the wanted rows of one step, ``[wanted, hidden]`` or ``[wanted, layers, hidden]``."""

    def __init__(
        self, rows: torch.Tensor, owners: list[tuple[Life | None, int, int]]
    ) -> None:
        # By place: numbers of rows and of draft tokens.
        self.rows, self.owners = rows, owners

    def follow(self, output: AsyncModelRunnerOutput, copy_stream: Any) -> "StepRows":
        """Start the copy to the host, parallel to vLLM's copy of its own `output`."""
        self._output, self._on_device = output, self.rows
        self._copied = torch.cuda.Event(blocking=True)
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self.rows = self.rows.to("cpu", non_blocking=True)
            self._copied.record(copy_stream)
        return self

    def get_output(self) -> Any:
        """Return the step's output with its rows, once both are on the host."""
        output = self._output.get_output()  # vLLM calls in the order of the steps
        self._copied.synchronize()
        return self.deliver(output)

    def deliver(self, output: Any) -> Any:
        """Write the rows to send into `output.pooler_output`, without those of rejected drafts."""
        output.pooler_output = [None] * len(self.owners)
        first = 0
        for i, (life, length, drafts) in enumerate(self.owners):
            if life is not None:
                count = len(output.sampled_token_ids[i])
                rejected = drafts + 1 - count if drafts and count else 0
                rows = self.rows[first : first + length - rejected]
                output.pooler_output[i] = life.take(rows, count)
                first += length
        return output


def chosen_layers(config: VllmConfig) -> list[int] | None:
    """Return the layers that the engine returns; None: the last. Raises ValueError."""
    layers = option(config, "hidden_state_layers")
    last = config.model_config.get_total_num_hidden_layers()
    wrong = layers == []
    if layers:
        wrong = layers != [n for n in range(last + 1) if n in layers]
    words = f"layers 0 to {last}, to be given in order"
    refuse(f"hidden_state_layers={layers}", {words: wrong})
    return layers


def check_generation(config: VllmConfig) -> None:
    """Raise ValueError with one sentence for settings that do not go with hidden states."""
    model = config.model_config
    parallel = config.parallel_config
    transfer = config.kv_transfer_config
    policy = transfer and transfer.kv_load_failure_policy
    layers = chosen_layers(config) or []
    use = "hidden_state_args() without layers"
    kind = model.runner_type
    stages = parallel.pipeline_parallel_size > 1
    relay = stages and parallel.distributed_executor_backend == "external_launcher"
    in_place = config.device_config.device_type == "cuda"
    in_place = in_place and not config.compilation_config.mode
    faults = {
        "a diffusion language model": model.is_diffusion,
        f"runner={kind!r}; use 'generate', or DiffusionWorker for a tensor": kind
        != "generate",
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "enable_return_routed_experts": config.aux_output_config.enable_return_routed_experts,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
        "kv_load_failure_policy='recompute'; use 'fail'": policy == "recompute",
        "layer 0 uncompiled, which vLLM overwrites; drop enforce_eager": 0 in layers
        and in_place,
        f"drafts; use {use}": layers and config.speculative_config,
        f"pipeline parallelism; use {use}": layers and stages,
        "external_launcher and pipeline parallelism on model runner v2; set "
        "VLLM_USE_V2_MODEL_RUNNER=0": relay and config.use_v2_model_runner,
    }
    refuse("ARWorker", faults)


class _HiddenStates(Runner):
    """Collect hidden states: what the mixins for both model runners share."""

    _lives: dict[str, Life] = cached_property(lambda self: {})  # type: ignore[assignment]
    _rows_stream: Any = cached_property(lambda self: torch.cuda.Stream())
    _layers: Any = cached_property(lambda self: chosen_layers(self.vllm_config))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, and have the model return the chosen inner layers."""
        super().load_model(*args, **kwargs)
        last = self.vllm_config.model_config.get_total_num_hidden_layers()
        inner = tuple(layer for layer in self._layers or () if layer < last)
        if inner:
            name = type(self.model).__name__
            taken = supports_eagle3(self.model)
            refuse("hidden_state_layers", {name: not taken})
            self.use_aux_hidden_state_outputs = True
            self.model.set_aux_hidden_state_layers(inner)

    def _start(self, request: Any, prompt: int, sampled: int = 0) -> None:
        """Start to collect a new or resumed request, given its numbers of tokens."""
        self._lives.pop(request.req_id, None)
        params = request.sampling_params
        if params is not None and (params.extra_args or {}).get(WANTED):
            sent = prompt + sampled - 1 if sampled else 0
            self._lives[request.req_id] = Life(request.num_computed_tokens, sent)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as vLLM does, and add the wanted rows to the output."""
        state = self.execute_model_state
        step = None
        if state is not None and self._lives:
            step = self._copy_rows(state)
        output = super().sample_tokens(grammar_output)
        if step is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return step.follow(output, self._rows_stream)
        step.rows = step.rows.cpu()
        return step.deliver(output)

    def _copy_rows(self, state: Any) -> StepRows | None:
        """Copy the wanted rows at once: with full CUDA graphs the next replay overwrites them."""
        parallel = self.vllm_config.parallel_config
        final = state.hidden_states
        # Under torchrun each rank is an engine and samples from broadcast logits.
        everywhere = parallel.distributed_executor_backend == "external_launcher"
        relay = everywhere and parallel.pipeline_parallel_size > 1
        here = isinstance(final, torch.Tensor)  # on the last rank of a pipeline
        slices, owners = [], []
        for req_id, first, count, drafts in self._places(state):
            life = self._lives.get(req_id)
            owners.append((life, count, drafts))
            if life is not None:
                slices.append(slice(first, first + count))
        sends = everywhere or get_tp_group().is_first_rank
        if not (slices and sends and (here or relay)):
            return None
        rows: Any = None
        if here and self._layers is None:
            rows = torch.cat([final[s] for s in slices])
        elif here:
            chosen = [*(state.aux_hidden_states or ()), final][: len(self._layers)]
            layers = []
            for layer in chosen:
                layers.append(torch.cat([layer[s] for s in slices]))
            rows = torch.stack(layers, dim=1)
        if relay:
            group = get_pp_group()
            sent = {"rows": rows} if here else None
            received: Any = group.broadcast_tensor_dict(sent, src=group.world_size - 1)
            rows = received["rows"]
        return StepRows(rows, owners)


class HiddenStatesV1(_HiddenStates):
    """Collect hidden states in ``v1/worker/gpu_model_runner.py``: a mixin."""

    def _update_states(self, scheduler_output: Any) -> Any:
        correct = super()._update_states(scheduler_output)
        for req_id in scheduler_output.finished_req_ids:
            self._lives.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._start(new, new.prompt_len)
        cached = scheduler_output.scheduled_cached_reqs
        pairs = zip(cached.req_ids, cached.num_output_tokens, strict=True)
        for req_id, outputs in pairs:
            if req_id in cached.resumed_req_ids:
                request = self.requests[req_id]
                self._start(request, request.num_prompt_tokens, outputs)
        return correct

    def _places(self, state: Any) -> list[tuple[str, int, int, int]]:
        """List the batch: request, first row, number of rows, number of draft tokens."""
        starts = self.query_start_loc.np.tolist()
        scheduled = state.scheduler_output
        lengths = scheduled.num_scheduled_tokens
        drafts = scheduled.scheduled_spec_decode_tokens
        ids = enumerate(self.input_batch.req_ids)
        return [(r, starts[i], lengths[r], len(drafts.get(r, ()))) for i, r in ids]


class HiddenStatesV2(_HiddenStates):
    """Collect hidden states in ``v1/worker/gpu/model_runner.py``: a mixin."""

    def add_requests(self, scheduler_output: Any) -> None:
        """Add requests as vLLM does, and start to collect their rows."""
        super().add_requests(scheduler_output)
        # A resumed request is a new request here.
        for new in scheduler_output.scheduled_new_reqs:
            sampled = len(new.prefill_token_ids) - new.prompt_len
            self._start(new, new.prompt_len, sampled)

    def _remove_request(self, req_id: str) -> Any:
        self._lives.pop(req_id, None)
        return super()._remove_request(req_id)

    def _places(self, state: Any) -> list[tuple[str, int, int, int]]:
        batch = state.input_batch
        starts = batch.query_start_loc_np.tolist()
        lengths = batch.num_scheduled_tokens.tolist()
        drafts = batch.num_draft_tokens_per_req
        drafts = [0] * batch.num_reqs if drafts is None else drafts.tolist()
        return list(zip(batch.req_ids, starts, lengths, drafts, strict=False))
