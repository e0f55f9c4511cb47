"""What the omni runners override, which entry point a model gets, and when rows leave a worker."""

import copy
import gc
import inspect
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.outputs import ModelRunnerOutput

from dllm_plugin.omni import (
    ar_runner,
    diffusion,
    hidden_state_args,
    hidden_state_params,
    hidden_states_of,
    images,
    option,
    pipeline,
    refusal,
    scheduler,
    tensor_of,
    workers,
)
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
    return [RunnerV1] * (ours.__name__[-1] != "2") + [RunnerV2] * (
        ours.__name__[-1] != "1"
    )


@pytest.mark.parametrize("ours", OVERRIDDEN, ids=lambda ours: ours.__name__)
def test_only_these_methods_are_overridden(ours: type) -> None:
    """No copied init_device, no copied execute_model: what is overridden calls its parent."""
    defined = {name for name, value in vars(ours).items() if inspect.isfunction(value)}
    defined |= {
        name for name, value in vars(ours).items() if isinstance(value, staticmethod)
    }
    inherited = {
        n for n in defined if any(hasattr(parent, n) for parent in parents(ours))
    }
    assert inherited == OVERRIDDEN[ours]
    for name in inherited - CALLS_NO_PARENT:
        assert f"super().{name}(" in inspect.getsource(vars(ours)[name])


def test_the_subpackage_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in OMNI.glob("*.py")) <= 1150


def model(*methods: str) -> NonARModel:
    """An instance of a class that has these methods."""
    return type(
        "Model", (NonARModel,), {name: lambda self, **kw: None for name in methods}
    )()


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
    with pytest.raises(
        ValueError, match=r"has none of sample\(\), forward\(\), diffuse\(\)"
    ):
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
    assert deliver(step(numbers[:4], (None, 1, 0), (life, 4, 0)), [7], []) == [
        None,
        None,
    ]
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
    (due,) = deliver(
        step(numbers[3:8], (life, 5, 4)), [1, 2]
    )  # one draft of four was accepted
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
    eighth = torch.zeros(4, dtype=torch.float8_e4m3fn)
    assert tensor_of(output(eighth)) is eighth


@pytest.mark.parametrize("seed", [None, "7", 2**64, -1, True])
def test_a_seed_that_is_none_is_refused_alone(seed: Any) -> None:
    """Also where the model itself would find no fault with it."""
    noisy = model("diffuse")
    noisy.diffuse = lambda condition, **inputs: [
        torch.randn(1, generator=c.generator()) for c in condition
    ]
    wishes = {"a": {"seed": 1}, "b": {"seed": seed}, "c": {}}
    conditions = [
        diffusion.Condition(name, params, (0, 1)) for name, params in wishes.items()
    ]
    first, refused, last = diffusion.EntryPoint(noisy)._run(conditions, {})
    assert first.shape == last.shape == (1,)
    assert b"seed must be an integer from 0 to 2**63 - 1" in refused.numpy().tobytes()


def test_a_type_error_of_check_params_refuses_only_its_request() -> None:
    picky = model("diffuse")
    picky.check_params = lambda params: params.get("steps", 1) < 9
    picky.diffuse = lambda condition, **inputs: torch.ones(len(condition), 1)
    wishes = [{"steps": "many"}, {"steps": 2}]
    conditions = [
        diffusion.Condition(str(i), params, (0, 1)) for i, params in enumerate(wishes)
    ]
    refused, done = diffusion.EntryPoint(picky)._run(conditions, {})
    assert b"not supported between" in refused.numpy().tobytes() and done.tolist() == [
        1
    ]


def test_a_model_on_a_stock_worker_says_how_to_start_it() -> None:
    with pytest.raises(NotImplementedError, match="DiffusionWorker"):
        model("diffuse")(torch.zeros(1), torch.zeros(1))


class Weight:
    """Something that a pipeline's frame keeps alive."""


@pytest.fixture
def uncollected() -> Any:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("end", ["fails", "exits", "cancelled", "returns"])
def test_what_a_call_held_is_free_when_it_ended(uncollected: None, end: str) -> None:
    """Without waiting for the garbage collector, which knows nothing of GPU memory."""
    held: list[Any] = []

    def call(job: pipeline.Job) -> torch.Tensor:
        weight = Weight()
        held.append(weakref.ref(weight))
        job.after_step(None, 0, None, {})
        if end == "fails":
            raise MemoryError("no more")
        if (
            end == "exits"
        ):  # no Exception; it ends this call, and the engine learns of it
            sys.exit("no more")
        return torch.ones(1)

    job = pipeline.Job(call)
    job.advance()
    assert job.step == 1 and not job.ended and held[0]() is not None
    job.advance(cancel=end == "cancelled")
    assert job.ended and held[0]() is None
    if end == "returns":
        assert job.error == "" and job.result.tolist() == [1]
    elif end != "cancelled":
        kind = b"MemoryError" if end == "fails" else b"SystemExit"
        assert kind + b": no more" in job.result.numpy().tobytes()
        assert "in call" in job.error  # the traceback, for the log


def test_as_many_calls_as_there_are_may_stand_between_steps() -> None:
    """A preempted request keeps its call; no pool of threads runs dry."""

    def call(job: pipeline.Job) -> torch.Tensor:
        for step in range(3):
            job.after_step(None, step, None, {})
        return torch.ones(1)

    jobs = [pipeline.Job(call) for _ in range(40)]
    for _ in range(4):
        for job in jobs:
            job.advance()
    assert all(job.ended and job.step == 3 for job in jobs)


def configured(omni: Any = None) -> VllmConfig:
    return VllmConfig(additional_config={} if omni is None else {"omni": omni})


@pytest.mark.parametrize(
    ("request_", "pixels"),
    [
        ({"num_images_per_prompt": 9999}, 9999 << 20),
        ({"num_images_per_prompt": 9, "width": 512}, 9 * 512 << 10),
        ({"width": 4096, "height": 1025}, 4096 * 1025),
    ],
)
def test_sizes_that_were_not_given_count(request_: dict[str, Any], pixels: int) -> None:
    with pytest.raises(
        VLLMValidationError, match=f"^{pixels} pixels .* 4194304 allowed.*max_pixels"
    ):
        images.check_request({"prompt": "x"} | request_, configured())
    images.check_request({"prompt": "x"} | request_, configured({"max_pixels": pixels}))


@pytest.mark.parametrize(
    "omni", [3, {"max_pixel": 5}, {"max_pixels": "big"}, {"hidden_state_layers": 3}]
)
def test_options_are_checked(omni: Any) -> None:
    with pytest.raises(ValueError, match="may have only hidden_state_layers") as raised:
        option(configured(omni), "max_pixels")
    assert repr(omni) in str(raised.value)


def test_where_rows_start_is_known_or_refused() -> None:
    """A stream of deltas ends without the number of its tokens; embeddings have no tokens."""
    from vllm import CompletionOutput, RequestOutput

    for kind in RequestOutputKind:
        wish = hidden_state_params(output_kind=kind)
        if kind != RequestOutputKind.DELTA:
            scheduler.HiddenStatesRules.validate_params(wish)
            continue
        with pytest.raises(ValueError, match="use CUMULATIVE or FINAL_ONLY"):
            scheduler.HiddenStatesRules.validate_params(wish)
    scheduler.HiddenStatesRules.validate_params(
        SamplingParams(output_kind=RequestOutputKind.DELTA)
    )
    rows = torch.zeros(4, 2).numpy()
    completion = CompletionOutput(0, "", [5, 6], None, None, routed_experts=rows)
    known = RequestOutput("1", None, [1, 2, 3, 4, 5], None, [completion], True)
    assert hidden_states_of(known).start == 2
    unknown = RequestOutput("1", None, None, None, [completion], True)
    with pytest.raises(ValueError, match="prompt_embeds"):
        hidden_states_of(unknown)


@pytest.fixture(scope="module")
def config() -> Any:
    """Of an engine that would start."""
    from transformers import LlamaConfig

    def as_llama(given: Any) -> Any:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        names = ["LlamaForCausalLM"]
        return LlamaConfig(
            **sizes, num_hidden_layers=2, vocab_size=320, architectures=names
        )

    folder = Path(__file__).parents[1] / "goldens" / "checkpoints" / "tiny-llada"
    settings = {
        "model": str(folder),
        "hf_overrides": as_llama,
        "skip_tokenizer_init": True,
    }
    return EngineArgs(
        **settings, dtype="float32", **hidden_state_args()
    ).create_engine_config()


@pytest.mark.parametrize(
    ("part", "fields", "sentence"),
    [
        (
            "model_config",
            {"runner_type": "pooling"},
            "use 'generate', or DiffusionWorker",
        ),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        (
            "aux_output_config",
            {"enable_return_routed_experts": True},
            "return_routed_experts",
        ),
        (
            "parallel_config",
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size",
        ),
        (
            None,
            {"layers": [0], "speculative_config": object()},
            "drafts; use hidden_state_args",
        ),
        (
            "parallel_config",
            {"layers": [0], "pipeline_parallel_size": 2},
            "pipeline parallelism;",
        ),
        (None, {"layers": [1, 0]}, "layers 0 to 2, to be given in order"),
        (None, {"layers": []}, "layers 0 to 2, to be given in order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_hidden_states_cannot_be_combined_with(
    config: Any, part: str | None, fields: dict[str, Any], sentence: str
) -> None:
    """Each in one sentence; vLLM's own configuration, changed in one place."""
    ar_runner.check_generation(config)
    changed, fields = copy.deepcopy(config), dict(fields)
    if "layers" in fields:
        changed.additional_config = {
            "omni": {"hidden_state_layers": fields.pop("layers")}
        }
    for name, value in fields.items():
        setattr(getattr(changed, part) if part else changed, name, value)
    with pytest.raises(ValueError, match=sentence):
        ar_runner.check_generation(changed)
