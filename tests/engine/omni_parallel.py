"""Two ranks: `python omni_parallel.py FOLDER workers`, or torchrun with `launcher`.

Hidden states of a tensor-parallel model and tensors of a pipeline; or hidden states of a pipeline
whose ranks are engines. Prints `RESULT`, the rank, and largest errors and preemptions by model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import omni_denoisers as denoisers  # noqa: E402
from omni_models import Reference, largest_error, twenty  # noqa: E402

from dllm_plugin.omni import hidden_state_args, tensor_args, tensor_of  # noqa: E402

denoisers.register()  # in the workers as well, which import this file again
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 16 << 20,
}
TIGHT = {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 14}


def hidden_states(folder: Path, **options: Any) -> tuple[float, int]:
    """Twenty mixed requests: largest error, and how many preemptions there were."""
    from engines import num_preemptions
    from vllm import LLM

    settings = SETTINGS | TIGHT | hidden_state_args() | options
    llm = LLM(str(folder), disable_log_stats=False, **settings)
    outputs = llm.generate(*twenty(), use_tqdm=False)
    preemptions = num_preemptions(llm)
    llm.llm_engine.engine_core.shutdown()
    return largest_error(Reference(folder), outputs), preemptions


def tensors(folder: Path, **options: Any) -> float:
    """Largest difference to the module called directly."""
    from safetensors.torch import load_file
    from vllm import LLM

    llm = LLM(str(folder), **SETTINGS, **tensor_args(), **options)
    model = denoisers.SampleModel(vllm_config=None)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    pairs = zip(denoisers.run(llm), denoisers.WISHES, strict=True)
    errors = [
        (tensor_of(o) - denoisers.directly(model, "sample", w)).abs().max()
        for o, w in pairs
    ]
    llm.llm_engine.engine_core.shutdown()
    return float(max(errors))


def main(folder: Path, mode: str) -> None:
    result: dict[str, Any] = {}
    if mode == "launcher":
        # vLLM cannot run a pipeline on the CPU without compilation; this mode compiles nothing.
        result["llama"] = hidden_states(
            folder / "llama",
            pipeline_parallel_size=2,
            distributed_executor_backend="external_launcher",
            compilation_config={"mode": 1},
        )
    else:
        options = {"tensor_parallel_size": 2, "enforce_eager": True}
        result["llama"] = hidden_states(folder / "llama", **options)
        result["tensors"] = tensors(folder / "sample", pipeline_parallel_size=2)
    # One write: print sends the end of the line apart, and ranks share the pipe.
    sys.stdout.write(f"RESULT {os.environ.get('RANK', 0)} {json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
