"""What the omni runners override, which entry point a model gets, and when rows leave a worker."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput

from dllm_plugin.omni import ar_runner, diffusion, refusal, scheduler, tensor_of, workers
from dllm_plugin.omni.diffusion import NonARModel, entry_point

OMNI = Path(workers.__file__).parent
# Methods of ours that exist in vLLM's class behind them; everything else of vLLM is inherited.
OVERRIDDEN = {
    workers._Worker: {"init_device"},
    workers.ARWorker: set(),
    workers.DiffusionWorker: set(),
    ar_runner._HiddenStates: {"load_model", "sample_tokens"},
    ar_runner.HiddenStatesV1: {"_update_states"},
    ar_runner.HiddenStatesV2: {"add_requests", "_remove_request"},
    diffusion._Diffusion: {
        *("load_model", "get_model", "get_supported_tasks", "_dummy_pooler_run"),
    },
    diffusion.DiffusionV1: {"_model_forward"},
    diffusion.DiffusionV2: {"load_model", "prepare_inputs"},
    scheduler.HiddenStatesScheduler: {"__new__", "update_from_output"},
    scheduler.PipelineScheduler: {"update_from_output"},
}
CALLS_NO_PARENT = {"get_model", "get_supported_tasks", "_dummy_pooler_run", "__new__"}


def parents(ours: type) -> list[type]:
    """vLLM's classes behind a class of ours."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

    if issubclass(ours, Worker | Scheduler):
        return [Worker if issubclass(ours, Worker) else Scheduler]
    return [RunnerV1] * (ours.__name__[-1] != "2") + [RunnerV2] * (ours.__name__[-1] != "1")


@pytest.mark.parametrize("ours", OVERRIDDEN, ids=lambda ours: ours.__name__)
def test_only_these_methods_are_overridden(ours: type) -> None:
    """No copied init_device, no copied execute_model: what is overridden calls its parent."""
    defined = {name for name, value in vars(ours).items() if inspect.isfunction(value)}
    defined |= {name for name, value in vars(ours).items() if isinstance(value, staticmethod)}
    inherited = {n for n in defined if any(hasattr(parent, n) for parent in parents(ours))}
    assert inherited == OVERRIDDEN[ours]
    for name in inherited - CALLS_NO_PARENT:
        assert f"super().{name}(" in inspect.getsource(vars(ours)[name])


def test_the_subpackage_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in OMNI.glob("*.py")) <= 900


def model(*methods: str) -> NonARModel:
    """An instance of a class that has these methods."""
    return type("Model", (NonARModel,), {name: lambda self, **kw: None for name in methods})()


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (["sample", "forward", "diffuse"], "sample"),
        (["sample", "diffuse"], "sample"),
        (["forward", "diffuse"], "forward"),
        (["diffuse"], "diffuse"),
    ],
)
def test_order_of_entry_points(methods: list[str], expected: str) -> None:
    """The forward() that every module inherits does not hide diffuse()."""
    assert entry_point(model(*methods)) == expected


def test_a_model_without_entry_point() -> None:
    with pytest.raises(ValueError, match=r"has none of sample\(\), forward\(\), diffuse\(\)"):
        entry_point(model())
    with pytest.raises(ValueError, match="ARWorker"):
        diffusion.EntryPoint(torch.nn.Linear(1, 1))


def test_a_model_may_not_return_another_number_of_tensors() -> None:
    short = model("diffuse")
    short.diffuse = lambda condition, **inputs: [torch.zeros(1)] * (len(condition) - 1)
    conditions = [diffusion.Condition(name, {}, (0, 1)) for name in "ab"]
    with pytest.raises(ValueError, match="zip"):
        diffusion.EntryPoint(short)._run(conditions, {})


def step(rows: torch.Tensor, *owners: Any) -> Any:
    return ar_runner.StepRows(rows, list(owners))


def deliver(rows: Any, *tokens: list[int]) -> list[Any]:
    names = [str(i) for i in range(len(tokens))]
    output = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, list(tokens))
    return rows.deliver(output).pooler_output


def test_rows_of_a_chunk_wait_for_the_step_that_samples() -> None:
    life, numbers = ar_runner.Life(0, 0), torch.arange(10.0)[:, None]
    assert deliver(step(numbers[:4], (None, 1, 0), (life, 4, 0)), [7], []) == [None, None]
    (due,) = deliver(step(numbers[4:6], (life, 2, 0)), [5])
    assert due.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert due.untyped_storage().nbytes() == 6 * 4  # not a view of a larger tensor


def test_recomputed_rows_are_not_sent_twice() -> None:
    """After preemption with eight known tokens, rows 0 to 6 are with the front end."""
    life, numbers = ar_runner.Life(computed=0, sent=7), torch.arange(10.0)[:, None]
    assert deliver(step(numbers[:5], (life, 5, 0)), []) == [None]
    (due,) = deliver(step(numbers[5:8], (life, 3, 0)), [5])
    assert due.flatten().tolist() == [7]


def test_rejected_drafts_have_no_rows() -> None:
    life, numbers = ar_runner.Life(3, 3), torch.arange(10.0)[:, None]
    (due,) = deliver(step(numbers[3:8], (life, 5, 4)), [1, 2])  # one draft of four was accepted
    assert due.flatten().tolist() == [3, 4] and life.computed == 5


def test_a_refusal_is_raised_with_its_sentence() -> None:
    from vllm import PoolingRequestOutput
    from vllm.outputs import PoolingOutput

    def output(tensor: torch.Tensor) -> Any:
        return PoolingRequestOutput("1", PoolingOutput(tensor), [], 0, True)

    with pytest.raises(ValueError, match="^width must be ÷ 8$"):
        tensor_of(output(refusal("width must be ÷ 8")))
    image = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    assert torch.equal(tensor_of(output(image)), image)
