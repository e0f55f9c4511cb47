"""Hidden states and denoisers on model runner v2: `python omni_interpreted.py FOLDER`.

It runs vLLM's Triton kernels on the CPU through Triton's interpreter, which needs a process of its
own, as tests/kernels/triton_interpreter.py says. Prints one line of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from triton.backends import Backend, backends
from triton_interpreter import HostDriver, NoCompiler

backends["cpu"] = Backend(compiler=NoCompiler, driver=HostDriver)

from torch._inductor.runtime.triton_helpers import libdevice  # noqa: E402

libdevice.isnan = lambda x: x != x  # the interpreter has no device library

import omni_denoisers as denoisers  # noqa: E402
from engines import EngineRoom, num_preemptions, scheduler  # noqa: E402
from omni_models import Reference, autoregressive, prompt  # noqa: E402

from dllm_plugin.omni import (  # noqa: E402
    hidden_state_args,
    hidden_state_params,
    tensor_args,
    tensor_of,
)

LAYERS = [0, 2, 3]  # the last one is what comes without a choice of layers
PROMPTS = [
    {"prompt_token_ids": prompt(n, i)} for i, n in enumerate([70, 60, 61, 33, 150])
]
SMALL = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def asked(max_tokens: int, **options: Any) -> Any:
    settings = {"temperature": 0, "ignore_eos": True, "detokenize": False} | options
    return hidden_state_params(max_tokens=max_tokens, **settings)


def modules_of_runner(worker: Any) -> list[str]:
    return [parent.__module__ for parent in type(worker.model_runner).__mro__]


def hidden_states(folder: Path, room: EngineRoom, ranks: int) -> tuple[float, int]:
    """Mixed prompts, chunked, preempted, scheduled asynchronously: largest error, preemptions."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if ranks == 1 else "0|1"
    pages = {"block_size": 32, "num_gpu_blocks_override": 10}
    args = SMALL | pages | {"additional_config": {}} | hidden_state_args(LAYERS)
    args |= {"async_scheduling": True, "tensor_parallel_size": ranks}
    llm = room.start(model=str(folder), **args)
    for modules in llm.collective_rpc(modules_of_runner):
        assert "vllm.v1.worker.gpu.model_runner" in modules
    outputs = llm.generate(PROMPTS, asked(10), use_tqdm=False)
    reference = Reference(folder)
    return max(reference.error(out, layers=LAYERS) for out in outputs), num_preemptions(
        llm
    )


def drafts(folder: Path, room: EngineRoom) -> tuple[float, int, int]:
    """A model that drafts for itself, which samples now and then: largest error, drafts, accepted.
    (The interpreter cannot run the kernel of vLLM's n-gram drafter.)"""
    model = str(folder)
    guess = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    args = (
        SMALL
        | {"additional_config": {}, "speculative_config": guess}
        | hidden_state_args()
    )
    llm = room.start(model=model, **args)
    wishes = [
        asked(20),
        asked(20, temperature=1.0, seed=1),
        asked(7),
        asked(20),
        asked(5),
    ]
    outputs = llm.generate(PROMPTS, wishes, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafted = metrics["vllm:spec_decode_num_draft_tokens"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    return max(map(Reference(folder).error, outputs)), drafted, accepted


def nan_counts(folder: Path, room: EngineRoom) -> list[int]:
    """Of each request in each step that delivered rows, the number of logits that are NaN."""
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
    llm = room.start(
        model=str(folder), **SMALL | {"additional_config": {}} | hidden_state_args()
    )
    found, update = [], scheduler(llm).update_from_output

    def watch(scheduled: Any, output: Any) -> Any:
        if any(rows is not None for rows in output.pooler_output or ()):
            found.extend(output.num_nans_in_logits.values())
        return update(scheduled, output)

    scheduler(llm).update_from_output = watch
    llm.generate(PROMPTS[:2], asked(3), use_tqdm=False)
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "0"
    return found


def tensors(folder: Path, room: EngineRoom) -> float:
    """Largest difference to the module called directly."""
    denoisers.register()
    tiny = denoisers.checkpoint(folder, "sample")
    llm = room.start(
        model=str(tiny), skip_tokenizer_init=True, additional_config={}, **tensor_args()
    )
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    pairs = zip(denoisers.run(llm), denoisers.WISHES, strict=True)
    errors = [
        (tensor_of(o) - denoisers.directly(model, "sample", w)).abs().max()
        for o, w in pairs
    ]
    return float(max(errors))


def main(folder: Path) -> None:
    room = EngineRoom()
    llama = autoregressive(folder / "llama", "Llama")
    result: dict[str, Any] = {
        "rows": hidden_states(llama, room, ranks=1),
        "ranks": hidden_states(llama, room, ranks=2),
        "drafts": drafts(llama, room),
        "nans": nan_counts(autoregressive(folder / "nan", "Llama", nan_rows=3), room),
        "tensors": tensors(folder / "sample", room),
    }
    room.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
