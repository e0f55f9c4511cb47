"""Run vLLM's GPU worker with our model runner, which hands grammars to the sampler.

And capture full CUDA graphs also of single-block steps, by our graph manager: otherwise
only piecewise graphs would hold them, and the host's launches take longer than the kernels.
:mod:`dllm_plugin.config.cuda_graphs` says when that worker is taken.
"""

from contextlib import AbstractContextManager
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import FastPrefillHelper
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from dllm_plugin.config.cuda_graphs import block_counts, canvases_needed
from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.engine.adapters import AdapterWorker
from dllm_plugin.engine.grammar_runner import GrammarRunner
from dllm_plugin.engine.weight_updates import UpdatingWorker


class BlockGraphManager(ModelCudaGraphManager):
    """Capture and find full graphs of whole canvases and of single blocks.

    Requests with a block length of their own make no uniform batch of the configured one and go on
    in piecewise graphs.
    """

    def _init_candidates(self) -> None:
        """List vLLM's graphs, and a full graph of single blocks for each number of requests.

        Leave out graphs of more whole canvases than any step computes once steps take single
        blocks.
        """
        super()._init_candidates()
        config, mode = get_decode_config(self.vllm_config), self.cudagraph_mode
        sizes, alone = self.compilation_config.cudagraph_capture_sizes, config.commit_alone_from
        if not (mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL and sizes):
            return
        if not alone:
            return
        captured = self._capture_descs.setdefault(CUDAGraphMode.FULL, [])
        canvases = sorted({desc.num_reqs for desc in captured if desc.num_reqs is not None})
        unused = set(canvases[canvases_needed(canvases, alone) :])
        for descs in (captured, *self._candidates.values()):
            descs[:] = [desc for desc in descs if desc.num_reqs not in unused]
        # The scheduler keeps room for a whole canvas of every running request.
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        most = min(self.max_num_reqs, tokens // config.canvas_length)
        counts = block_counts(sizes, config.block_length, alone, most)
        for num_active_loras in self.lora_capture_cases:
            first = 0
            for num_reqs in counts:
                desc = BatchExecutionDescriptor(
                    CUDAGraphMode.FULL,
                    num_reqs * config.block_length,
                    num_reqs,
                    uniform_token_count=config.block_length,
                    num_active_loras=num_active_loras,
                )
                captured.append(desc)
                for num_tokens in range(first, desc.num_tokens + 1):
                    # Before the piecewise graph, which takes any batch.
                    self._candidates.setdefault((num_tokens, num_active_loras), []).insert(0, desc)
                first = desc.num_tokens + 1
        # The largest first: it makes the buffer of results, and vLLM's profile counts on it.
        captured.sort(key=lambda desc: desc.num_tokens, reverse=True)


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
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
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
            self.fast_prefill = FastPrefillHelper(self.cudagraph_manager, self.max_num_tokens)


class GrammarWorker(AdapterWorker, UpdatingWorker):
    """Run vLLM's worker with grammars on canvases, and with its own graphs."""

    def _make_model_runner(self) -> Any:
        """Return the runner, of version 2 as everywhere in this package."""
        assert self.use_v2_model_runner and self.device is not None
        return GrammarRunner(self.vllm_config, self.device)


class DiffusionWorker(AdapterWorker, UpdatingWorker):
    """Run vLLM's worker with that runner."""

    def _make_model_runner(self) -> Any:
        """Return the runner, of version 2 as everywhere in this package."""
        assert self.use_v2_model_runner and self.device is not None
        return DiffusionRunner(self.vllm_config, self.device)
