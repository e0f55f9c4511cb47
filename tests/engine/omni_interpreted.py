"""Hidden states and denoisers on model runner v2: `python omni_interpreted.py FOLDER`.

It runs vLLM's Triton kernels on the CPU through Triton's interpreter, which needs a process of its
own, as tests/unit/triton_interpreter.py says. Prints one line of JSON: the largest errors.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from triton.backends import Backend, backends
from unit.triton_interpreter import HostDriver, NoCompiler

backends["cpu"] = Backend(compiler=NoCompiler, driver=HostDriver)

import omni_denoisers as denoisers  # noqa: E402
from engines import EngineRoom, num_preemptions  # noqa: E402
from omni_models import Reference, autoregressive, prompt  # noqa: E402

from dllm_plugin.omni import hidden_state_args, hidden_state_params, tensor_args, tensor_of  # noqa: E402

LAYERS = [0, 2, 3]  # the last one is what comes without a choice of layers


def hidden_states(folder: Path, room: EngineRoom) -> tuple[float, int]:
    """Mixed prompts, chunked, preempted, scheduled asynchronously: largest error, preemptions."""
    args = hidden_state_args(LAYERS)
    llm = room.start(
        model=str(folder),
        async_scheduling=True,
        skip_tokenizer_init=True,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
        num_gpu_blocks_override=10,
        **{"additional_config": {}, **args},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert "vllm.v1.worker.gpu.model_runner" in {c.__module__ for c in type(runner).__mro__}
    prompts = [prompt(n, i) for i, n in enumerate([70, 60, 61, 33, 150])]
    asked = hidden_state_params(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    reference = Reference(folder)
    return max(reference.error(out, layers=LAYERS) for out in outputs), num_preemptions(llm)


def main(folder: Path) -> None:
    room = EngineRoom()
    llama = autoregressive(folder / "llama", "Llama")
    rows, preemptions = hidden_states(llama, room)
    denoisers.register()
    tiny = denoisers.checkpoint(folder / "sample", "sample")
    llm = room.start(
        model=str(tiny), skip_tokenizer_init=True, additional_config={}, **tensor_args()
    )
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    pairs = zip(denoisers.run(llm), denoisers.WISHES, strict=True)
    errors = [(tensor_of(o) - denoisers.directly(model, "sample", w)).abs().max() for o, w in pairs]
    room.close()
    print(json.dumps({"rows": rows, "preemptions": preemptions, "tensors": float(max(errors))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
