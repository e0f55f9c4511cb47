"""Two ranks: `python omni_parallel.py FOLDER workers`, or torchrun with `launcher`.

Hidden states of a tensor-parallel model and tensors of a pipeline; or hidden states of a pipeline
whose ranks are engines. Prints `RESULT` and the largest errors.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import omni_denoisers as denoisers  # noqa: E402
from omni_models import Reference, prompt  # noqa: E402

from dllm_plugin.omni import (  # noqa: E402
    hidden_state_args,
    hidden_state_params,
    tensor_args,
    tensor_of,
)

denoisers.register()  # in the workers as well, which import this file again
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 10,
    "kv_cache_memory_bytes": 16 << 20,
    "disable_log_stats": False,
}


def hidden_states(folder: Path, **options: object) -> list[float]:
    """Errors of a mixed batch, and how many preemptions it saw."""
    from engines import num_preemptions
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), **SETTINGS, **hidden_state_args(), **options)
    prompts = [prompt(n, i) for i, n in enumerate([70, 60, 61, 33, 150])]
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": 50}
    wishes = [SamplingParams(**common)] + [hidden_state_params(**common)] * 4
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], wishes, use_tqdm=False)
    assert outputs[0].outputs[0].routed_experts is None
    reference = Reference(folder)
    result = [reference.error(output) for output in outputs[1:]] + [num_preemptions(llm)]
    llm.llm_engine.engine_core.shutdown()
    return result


def tensors(folder: Path, **options: object) -> float:
    """Largest difference to the module called directly."""
    from safetensors.torch import load_file
    from vllm import LLM

    settings = {k: SETTINGS[k] for k in ("dtype", "skip_tokenizer_init", "kv_cache_memory_bytes")}
    llm = LLM(
        str(folder), max_model_len=128, max_num_seqs=8, **settings, **tensor_args(), **options
    )
    model = denoisers.SampleModel(vllm_config=None)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    pairs = zip(denoisers.run(llm), denoisers.WISHES, strict=True)
    errors = [(tensor_of(o) - denoisers.directly(model, "sample", w)).abs().max() for o, w in pairs]
    llm.llm_engine.engine_core.shutdown()
    return float(max(errors))


def main(folder: Path, mode: str) -> None:
    if mode == "launcher":
        options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
        result = [hidden_states(folder / "llama", **options)]
    else:
        result = [
            hidden_states(folder / "llama", tensor_parallel_size=2),
            tensors(folder / "sample", pipeline_parallel_size=2),
        ]
    print(f"RESULT {os.environ.get('RANK', 0)} {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
