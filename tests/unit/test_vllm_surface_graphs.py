"""What our worker, runner and graph manager override, call and read of vLLM's."""

import inspect

import pytest
from surface import arguments, fields_of, found_in_vllm
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

GRAPHS = "v1.worker.gpu.cudagraph_utils:"
RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner"
SIGNATURES = {
    GRAPHS + "ModelCudaGraphManager": "vllm_config device cudagraph_mode decode_query_len "
    "lora_capture_cases=None varlen_decode=False ubatch_runner=None",
    GRAPHS + "ModelCudaGraphManager._init_candidates": "self",
    GRAPHS + "BatchExecutionDescriptor": "cg_mode num_tokens num_reqs uniform_token_count=None "
    "max_query_len=None num_active_loras=0 num_ubatches=1",
    RUNNER: "vllm_config device",
    RUNNER + ".initialize_kv_cache": "self kv_cache_config is_profiling=False "
    "kv_cache_allocation_context=None",
    "v1.worker.gpu.attn_utils:FastPrefillHelper": "cudagraph_manager max_num_tokens",
    "v1.worker.gpu_worker:Worker._make_model_runner": "self",
    "config.compilation:CUDAGraphMode.decode_mode": "self",
    "config.compilation:CUDAGraphMode.separate_routine": "self",
}
FIELDS = {
    CudaGraphManager: "vllm_config compilation_config cudagraph_mode decode_query_len "
    "lora_capture_cases max_num_reqs ubatch_runner varlen_decode _candidates _capture_descs",
    GPUModelRunner: "cudagraph_manager device fast_prefill lora_capture_cases max_num_tokens "
    "vllm_config",
    Worker: "model_runner use_v2_model_runner",
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signature(name: str) -> None:
    assert arguments(found_in_vllm(name)) == SIGNATURES[name]


@pytest.mark.parametrize("owner", list(FIELDS), ids=lambda owner: owner.__name__)
def test_fields(owner: type) -> None:
    assert set(FIELDS[owner].split()) - fields_of(owner) == set()


def test_nobody_else_keeps_the_manager() -> None:
    """What the runner hands on while it initialises: we hand on ours instead."""
    source = inspect.getsource(GPUModelRunner.initialize_kv_cache)
    assert source.count("self.cudagraph_manager") == 2  # made, and given to FastPrefillHelper
    assert (
        "FastPrefillHelper(\n                self.cudagraph_manager, self.max_num_tokens" in source
    )


def test_only_the_separate_modes_of_decodes_are_asked_for_full_graphs() -> None:
    full = [mode for mode in CUDAGraphMode if mode.separate_routine()]
    assert {mode.decode_mode() for mode in full} == {CUDAGraphMode.FULL}
