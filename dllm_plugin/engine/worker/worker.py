"""Run vLLM's GPU worker with our model runner and our CUDA graphs.

The runner passes checks of grammars to the sampler, and keeps canvases of requests with a grammar:
vLLM copies whole canvases to the host with every step anyway, and keeps only what is emitted.

The graph manager captures full graphs also of uniform lengths other than the canvas. In piecewise
graphs the host's launches of such steps take longer than the kernels.
"""

from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import current_stream
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.attn_utils import FastPrefillHelper
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dllm_plugin.config.cuda_graphs import uniform_graphs
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.config.worker_carriers import unpack_canvases
from dllm_plugin.engine.grammars.automata import CanvasChecks, CanvasOutput
from dllm_plugin.sampling.features.automata import Automata
from dllm_plugin.sampling.features.grammars import StagedChecks

from .graph_times import measure, prepare
from .weight_updates import UpdatingWorker

UNLIMITED = np.iinfo(np.int32).max


class AsyncCanvasOutput(AsyncModelRunnerOutput):
    """Wait for a step's result, and keep the canvases of some requests."""

    def __init__(self, output: AsyncOutput, req_ids: list[str]) -> None:
        self.output = output
        self.req_ids = req_ids

    def get_output(self) -> ModelRunnerOutput:
        """Return the result once it is on the host."""
        result = self.output.get_output()
        canvases = unpack_canvases(self.output.sampled_token_ids, result, self.req_ids)
        return CanvasOutput(**vars(result), canvases=canvases)


class GrammarRunner(GPUModelRunner):
    """Run vLLM's model runner with grammars on canvases."""

    def prepare_step(self, *args: Any) -> Any:
        """Fill the buffers of a step of one width, for `diffuplug bench map`."""
        return prepare(self, *args)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does; make canvases also on stages without a sampler."""
        super().load_model(*args, **kwargs)
        if not self.is_last_pp_rank:
            state: Any = self.model_state
            state.place_canvases(self.req_states)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add as vLLM does; earlier stages learn the result of every prompt's last chunk.

        vLLM leaves it out if one token ends the request, but part of a prompt may be rolled back.
        """
        super().add_requests(scheduler_output)
        if self.use_pp:
            slots = self.req_states.req_id_to_index
            for data in scheduler_output.scheduled_new_reqs:
                self.req_states.max_seq_len[slots[data.req_id]] = UNLIMITED

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample as vLLM does; with checks of canvases, hand them to the sampler first."""
        # vLLM's warm-up brings a bitmask of its own; earlier stages sample nothing.
        if not self.is_last_pp_rank or not isinstance(grammar_output, CanvasChecks):
            return super().sample_tokens(grammar_output)
        sampler: Any = self.sampler
        features = sampler.features
        if grammar_output.starts:
            features[Automata].start(grammar_output.starts)
        payload = grammar_output.payload
        checks = features[StagedChecks]
        checks.stage(payload)
        output = super().sample_tokens(None)
        checks.stage(None)
        if payload is not None and isinstance(output, AsyncOutput):
            return AsyncCanvasOutput(output, payload.req_ids)
        return output


class BlockGraphManager(ModelCudaGraphManager):
    """Capture and find full graphs of whole canvases, and of other uniform lengths.

    Steps in which requests compute different numbers of positions go on in piecewise graphs.
    """

    def _init_candidates(self) -> None:
        """List vLLM's graphs, of uniform steps those that our table has in place of canvases."""
        super()._init_candidates()
        config = get_decode_config(self.vllm_config)
        mode = self.cudagraph_mode
        sizes = self.compilation_config.cudagraph_capture_sizes
        full_decodes = mode.decode_mode() == CUDAGraphMode.FULL
        if not (mode.separate_routine() and full_decodes and sizes):
            return
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        table = uniform_graphs(config, sizes, self.max_num_reqs, tokens)
        captured = self._capture_descs.setdefault(CUDAGraphMode.FULL, [])
        for descs in (captured, *self._candidates.values()):
            descs[:] = [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
        for length, counts in table.items():
            self._add(length, counts)
        # The largest first: it makes the buffer of results, and vLLM's profile counts on it.
        captured.sort(key=lambda desc: desc.num_tokens, reverse=True)

    def _add(self, length: int, counts: list[int]) -> None:
        """Add a full graph for each number of requests that compute `length` positions each."""
        for num_active_loras in self.lora_capture_cases:
            first = 0
            for num_reqs in counts:
                desc = BatchExecutionDescriptor(
                    CUDAGraphMode.FULL,
                    num_reqs * length,
                    num_reqs,
                    uniform_token_count=length,
                    num_active_loras=num_active_loras,
                )
                self._capture_descs[CUDAGraphMode.FULL].append(desc)
                for num_tokens in range(first, desc.num_tokens + 1):
                    # Before the piecewise graph, which takes any batch.
                    self._candidates.setdefault(
                        (num_tokens, num_active_loras), []
                    ).insert(0, desc)
                first = desc.num_tokens + 1


class DiffusionRunner(GrammarRunner):
    """Run the model runner with `BlockGraphManager`."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Initialize as vLLM does, which makes a graph manager for the mode that backends allow.

        Called twice: vLLM's profile of graph memory captures with a manager of its own.
        """
        super().initialize_kv_cache(*args, **kwargs)
        given = self.cudagraph_manager
        assert given is not None
        self.cudagraph_manager = BlockGraphManager(
            self.vllm_config,
            self.device,
            given.cudagraph_mode,
            given.decode_query_len,
            lora_capture_cases=self.lora_capture_cases,
            varlen_decode=given.varlen_decode,
            ubatch_runner=given.ubatch_runner,
        )
        if self.fast_prefill is not None:
            self.fast_prefill = FastPrefillHelper(
                self.cudagraph_manager, self.max_num_tokens
            )

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture as vLLM does; then measure the times of steps if widths are chosen by them."""
        taken = super().capture_model(profile_only=profile_only)
        manager = self.cudagraph_manager
        if not profile_only and manager and manager.graphs:
            measure(self)
        return taken


class GrammarWorker(UpdatingWorker):
    """Run vLLM's worker with grammars on canvases, and with vLLM's graphs."""

    runner_class: type[GrammarRunner] = GrammarRunner

    def _make_model_runner(self) -> Any:
        """Return the runner, of version 2 as everywhere in this package."""
        assert self.use_v2_model_runner and self.device is not None
        if self.parallel_config.pipeline_parallel_size > 1:
            # The first call exchanges the stream if NCCL's warm-up did not, and stages wait for
            # the stream on which their runner was made. Shared experts would call it later.
            current_stream()
        return self.runner_class(self.vllm_config, self.device)


class DiffusionWorker(GrammarWorker):
    """Run `GrammarWorker` with our graphs."""

    runner_class = DiffusionRunner
