"""Hidden states, tensors and images on a GPU; the pipeline's test needs diffusers."""

from pathlib import Path

import omni_denoisers as denoisers
import pytest
import torch
from omni_models import Reference, autoregressive, pipeline, prompt

from dllm_plugin.omni import (
    hidden_state_args,
    hidden_state_params,
    hidden_states_of,
    pipeline_args,
    tensor_args,
    tensor_of,
)

PROMPTS = [prompt(n, i) for i, n in enumerate([5, 150, 17, 33, 70, 64, 1, 100] * 3)][
    :20
]
# Layers of the decoder, and how large a float32 error may be: the second reaches values of 58.
LAYERS = [(None, 1e-4), ([0, 2, 3], 1e-3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return autoregressive(
        tmp_path_factory.mktemp("llama") / "llama", "Llama", hidden=128
    )


def generate(folder: Path, dtype: str, **options):
    """Outputs of twenty mixed requests; chunked prompts and, for want of pages, preemption."""
    from vllm import LLM

    llm = LLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        num_gpu_blocks_override=64,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 28,
        attention_backend="TRITON_ATTN",
        disable_log_stats=False,
        **options,
    )
    asked = hidden_state_params(
        temperature=0, max_tokens=40, ignore_eos=True, detokenize=False
    )
    inputs = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    outputs = llm.generate(inputs, asked, use_tqdm=False)
    preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    config = llm.llm_engine.vllm_config
    llm.llm_engine.engine_core.shutdown()
    return outputs, sum(preempted), config


@pytest.mark.parametrize(("layers", "limit"), LAYERS, ids=["last", "layers"])
def test_full_graphs_and_async_scheduling_equal_eager_and_transformers(
    llama, layers, limit
):
    """Float32: every row is that of a plain forward of prompt and generated tokens."""
    full = {"compilation_config": {"cudagraph_mode": "FULL"}, "async_scheduling": True}
    eager = {"enforce_eager": True, "async_scheduling": False}
    reference = Reference(llama)
    if layers is not None:
        # Uncompiled, vLLM adds in place to the embedding that it hands out as layer 0: refused.
        eager |= {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_mode": "NONE"},
        }
    found = {}
    for name, options in (("full", full), ("eager", eager)):
        outputs, preempted, config = generate(
            llama, "float32", **options, **hidden_state_args(layers)
        )
        assert preempted > 0
        assert config.scheduler_config.async_scheduling is (name == "full")
        assert max(reference.error(output, layers=layers) for output in outputs) < limit
        found[name] = outputs
    for one, other in zip(found["full"], found["eager"], strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
        rows = [
            torch.from_numpy(hidden_states_of(output).rows.copy())
            for output in (one, other)
        ]
        assert (rows[0] - rows[1]).abs().max() < limit


def test_bfloat16(llama):
    """Rows arrive as float32; they differ from a float32 forward by bfloat16's rounding."""
    outputs, _, _ = generate(llama, "bfloat16", **hidden_state_args())
    reference = Reference(llama)
    for output in outputs:
        rows = torch.from_numpy(hidden_states_of(output).rows.copy())
        wanted = reference.rows(
            [*output.prompt_token_ids, *output.outputs[0].token_ids]
        )
        cosine = torch.nn.functional.cosine_similarity(rows, wanted, dim=-1)
        assert cosine.min() > 0.95


@pytest.mark.parametrize("name", list(denoisers.MODELS))
def test_denoisers(tmp_path, monkeypatch, name):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    denoisers.register()
    folder = denoisers.checkpoint(tmp_path / name, name)
    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 28,
        **tensor_args(),
    )
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    assert model.words.weight.is_cuda
    for output, wish in zip(denoisers.run(llm), denoisers.WISHES, strict=True):
        expected = denoisers.directly(model, name, wish)
        assert (tensor_of(output) - expected).abs().max() < 1e-4
    llm.llm_engine.engine_core.shutdown()


def test_pipeline_bit_for_bit(tmp_path, monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    folder = pipeline(tmp_path)
    llm = LLM(str(folder), dtype="float32", max_model_len=2048, **pipeline_args())
    requests = [
        {
            "prompt": f"a cat {i}",
            "seed": i,
            "num_inference_steps": 2 + i,
            "width": 16,
            "height": 16,
        }
        for i in range(6)
    ]
    data = [request | {"output_type": "pt"} for request in requests]
    (answer,) = llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    assert executor.pipe.device.type == "cuda"
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder).to("cuda")
    for request, images in zip(requests, answer.outputs, strict=True):
        generator = torch.Generator().manual_seed(request.pop("seed"))
        wanted = pipe(
            **request, generator=generator, output_type="pt", return_dict=False
        )[0]
        assert torch.equal(images, wanted.float().cpu())
    before = torch.cuda.memory_allocated()
    llm.sleep(level=1)
    assert torch.cuda.memory_allocated() < before
    llm.wake_up()
    (again,) = llm.encode({"data": data[0]}, pooling_task="plugin", use_tqdm=False)
    assert torch.equal(again.outputs[0], answer.outputs[0])
    llm.llm_engine.engine_core.shutdown()
