"""Run vLLM's GPU worker with our model runner, which hands grammars to the sampler.

And capture full CUDA graphs also of steps of other uniform lengths than the canvas, by our graph
manager: otherwise only piecewise graphs would hold them, and the host's launches take longer than
the kernels.
:mod:`dllm_plugin.config.cuda_graphs` says when that worker is taken.
"""

from contextlib import AbstractContextManager
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import FastPrefillHelper
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
)

from dllm_plugin.config.cuda_graphs import uniform_graphs
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.engine.worker.grammar_runner import GrammarRunner
from dllm_plugin.engine.worker.graph_times import measure
from dllm_plugin.engine.worker.step_timer import TimingWorker
from dllm_plugin.engine.worker.weight_updates import AdapterWorker, UpdatingWorker


class BlockGraphManager(ModelCudaGraphManager):
    """Capture and find full graphs of whole canvases, and of other uniform lengths.

    Steps in which requests compute different numbers of positions go on in piecewise graphs.
    """

    def _init_candidates(self) -> None:
        """List vLLM's graphs, of uniform steps those that our table has in place of canvases."""
        super()._init_candidates()
        config, mode = get_decode_config(self.vllm_config), self.cudagraph_mode
        sizes = self.compilation_config.cudagraph_capture_sizes
        if not (
            mode.separate_routine()
            and mode.decode_mode() == CUDAGraphMode.FULL
            and sizes
        ):
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
    """Run the model runner with that manager."""

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> None:
        """Initialize as vLLM does, which makes a graph manager for the mode that backends allow.

        Called twice: vLLM's profile of graph memory captures with a manager of its own.
        """
        super().initialize_kv_cache(
            kv_cache_config, is_profiling, kv_cache_allocation_context
        )
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
        """Capture as vLLM does; then measure what steps take, where widths are chosen by it."""
        taken = super().capture_model(profile_only=profile_only)
        if (
            not profile_only
            and self.cudagraph_manager
            and self.cudagraph_manager.graphs
        ):
            measure(self)
        return taken


class GrammarWorker(AdapterWorker, UpdatingWorker, TimingWorker):
    """Run vLLM's worker with grammars on canvases, and with its own graphs."""

    runner_class: type[GrammarRunner] = GrammarRunner

    def _make_model_runner(self) -> Any:
        """Return the runner, of version 2 as everywhere in this package."""
        assert self.use_v2_model_runner and self.device is not None
        return self.runner_class(self.vllm_config, self.device)


class DiffusionWorker(GrammarWorker):
    """Run that worker with our graphs."""

    runner_class = DiffusionRunner
