"""Image pipelines in the engine, against the same pipeline called directly."""

import asyncio
import subprocess
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineRoom
from forked import PYTHON
from omni_models import pipeline
from processes import START_SECONDS, end, environment, spawn

from dllm_plugin.omni import pipeline_args

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

REQUESTS = [
    {
        "prompt": f"a cat {i}",
        "negative_prompt": "dog",
        "seed": i,
        "num_inference_steps": 2 + i % 4,
        "guidance_scale": (1.0, 7.5, 3)[i % 3],
        "width": 16 + 8 * (i % 2),
        "height": 16,
        "num_images_per_prompt": 1 + i % 2,
    }
    for i in range(16)
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline(tmp_path_factory.mktemp("diffusers"))


@pytest.fixture(scope="session")
def direct(folder: Path) -> Any:
    """The pipeline called directly: request -> float32 ``[n, 3, height, width]``."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)

    def call(request: dict[str, Any], kind: str = "pt") -> Any:
        options = dict(request)
        generator = torch.Generator().manual_seed(options.pop("seed"))
        return pipe(
            **options, generator=generator, output_type=kind, return_dict=False
        )[0]

    return call


@pytest.fixture
def llm(room: EngineRoom, folder: Path) -> Any:
    options = {
        "max_model_len": 2048,
        "additional_config": {},
        "disable_log_stats": True,
    }
    return room.start(model=str(folder), **options, **pipeline_args())


def encode(llm: Any, data: Any) -> Any:
    return llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)[0].outputs


def executor(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor


def test_sixteen_requests_bit_for_bit(llm: Any, direct: Any) -> None:
    """Four take turns at a time; images, sizes, steps and scales are each request's own."""
    found = encode(llm, [request | {"output_type": "pt"} for request in REQUESTS])
    for request, images in zip(REQUESTS, found, strict=True):
        assert images.dtype == torch.float32 and torch.equal(images, direct(request))


def test_pil_images(llm: Any, direct: Any) -> None:
    (images,) = encode(llm, REQUESTS[1])
    expected = direct(REQUESTS[1], "pil")
    assert [image.tobytes() for image in images] == [
        image.tobytes() for image in expected
    ]
    assert images[0].size == (24, 16) and len(images) == 2
    first, second = encode(llm, [{**REQUESTS[0], "prompt": "x"}, REQUESTS[0]])
    assert first[0].tobytes() != second[0].tobytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nonsense": 1}, "takes no nonsense"),
        ({"callback_on_step_end": 1}, "takes no callback_on_step_end"),
        ({"width": 12.5}, "width must be an integer from 1 to 9999, got 12.5"),
        ({"width": 17}, "divisible by 8"),
        ({"seed": -1}, "seed must be"),
        ({"num_inference_steps": 0}, "num_inference_steps must be"),
        ({"width": 9992, "height": 9992}, "4194304 allowed"),
        ({"output_type": "np"}, "output_type must be"),
    ],
)
def test_a_bad_request_ends_alone(
    llm: Any, direct: Any, change: dict[str, Any], sentence: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=sentence):
        encode(llm, REQUESTS[0] | change)
    (images,) = encode(llm, [REQUESTS[0] | {"output_type": "pt"}])
    assert torch.equal(images, direct(REQUESTS[0]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": -1}, r"^data\[1\]: seed must be"),
        ({"width": 17}, r"^data\[1\]: .*divisible by 8"),
    ],
)
def test_a_list_names_the_entry_that_was_refused(
    llm: Any, direct: Any, change: dict[str, Any], sentence: str
) -> None:
    """By the front end before any work, or by the pipeline; nothing of the list is left behind."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=sentence):
        encode(llm, [REQUESTS[0], REQUESTS[1] | change, REQUESTS[2]])
    assert executor(llm).jobs == {} and executor(llm).requests == {}
    assert not llm.llm_engine.has_unfinished_requests()
    (images,) = encode(llm, [REQUESTS[0] | {"output_type": "pt"}])
    assert torch.equal(images, direct(REQUESTS[0]))


def test_requests_without_the_front_end(llm: Any) -> None:
    """Bytes that are no request reach the executor and are refused there."""
    from dllm_plugin.omni import tensor_of

    engine = llm.llm_engine
    from vllm import PoolingParams

    for name, prompt in (
        ("1", [1, 2]),
        ("2", list(b"[]")),
        ("3", list(b'{"prompt": 5}')),
    ):
        engine.add_request(
            name, {"prompt_token_ids": prompt}, PoolingParams(task="plugin")
        )
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for output in outputs:
        with pytest.raises(ValueError, match="Error: "):
            tensor_of(output)
    assert len(outputs) == 3


def test_an_abort_takes_effect_at_the_next_step(
    llm: Any, direct: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine step is one denoising step of each request; progress says where they are."""
    from vllm import PoolingParams

    from dllm_plugin.omni import tensor_of
    from dllm_plugin.omni.images import ImageProcessor

    engine, outputs = llm.llm_engine, []
    requests = [
        REQUESTS[i] | {"num_inference_steps": 9, "output_type": "pt"} for i in (0, 1, 2)
    ]
    inputs = ImageProcessor.pre_process(None, requests)  # type: ignore[arg-type]
    for i, one in enumerate(inputs):
        engine.add_request(str(i), one, PoolingParams(task="plugin"))
    steps = 0
    while engine.has_unfinished_requests():
        outputs += engine.step()
        steps += 1
        if steps == 3:
            (progress,) = engine.collective_rpc("progress")
            assert list(progress.values()) == [(3, 9)] * 3
            engine.abort_request(["1"])
            threads = [job for job in executor(llm).jobs.values()]
        if steps == 4:
            (progress,) = engine.collective_rpc("progress")
            assert list(progress.values()) == [(4, 9)] * 2
            assert [job.ended for job in threads] == [False, True, False]
            assert threads[1].step == 3
    assert steps == 10  # nine denoising steps, and one to decode
    assert sorted(output.request_id for output in outputs) == ["0", "2"]
    for output in outputs:
        expected = direct(REQUESTS[int(output.request_id)] | {"num_inference_steps": 9})
        assert torch.equal(tensor_of(output), expected)
    assert executor(llm).jobs == {} and executor(llm).requests == {}


NINE = {"num_inference_steps": 9}


def begin(engine: Any, count: int) -> None:
    """Add requests of nine denoising steps and run two."""
    from vllm import PoolingParams

    from dllm_plugin.omni.images import ImageProcessor

    requests = [REQUESTS[i] | NINE | {"output_type": "pt"} for i in range(count)]
    for i, one in enumerate(ImageProcessor.pre_process(None, requests)):  # type: ignore[arg-type]
        engine.add_request(str(i), one, PoolingParams(task="plugin"))
    for _ in range(2):
        engine.step()


@pytest.mark.parametrize("interrupt", ["preempted", "slept-1", "slept-2"])
def test_work_that_was_interrupted_goes_on(
    llm: Any, direct: Any, interrupt: str
) -> None:
    """All running requests go back to the queue. Level 2 frees the weights though requests run."""
    from dllm_plugin.omni import tensor_of

    engine, done = llm.llm_engine, {}
    begin(engine, 6)
    if interrupt == "preempted":
        engine.reset_prefix_cache(reset_running_requests=True)
    else:
        weights = weakref.ref(executor(llm).pipe.unet)
        engine.sleep(level=int(interrupt[-1]), mode="keep")
        assert (weights() is None) == (interrupt == "slept-2")
        engine.wake_up()
    while engine.has_unfinished_requests():
        done |= {output.request_id: tensor_of(output) for output in engine.step()}
    for i in range(6):
        assert torch.equal(done[str(i)], direct(REQUESTS[i] | NINE))


def test_a_process_ends_though_an_image_is_half_done(folder: Path) -> None:
    lines = [
        *("import sys", "sys.path[:0] = sys.argv[2:]", "from vllm import LLM"),
        *(
            "from dllm_plugin.omni import pipeline_args",
            "from test_omni_pipelines import begin",
        ),
        *("llm = LLM(sys.argv[1], max_model_len=2048, **pipeline_args())",),
        *("begin(llm.llm_engine, 2)", "print('HALF DONE', flush=True)"),
    ]
    variables = environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING"
    )
    here = Path(__file__).parent
    process = spawn(
        [PYTHON, "-c", "\n".join(lines), str(folder), str(here), str(here.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
    )
    try:
        text = process.communicate(timeout=START_SECONDS)[0].decode()
    finally:
        end(process)
    assert process.returncode == 0 and "HALF DONE" in text, text[-3000:]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scheduler_cls": None}, "use 'dllm_plugin.omni.scheduler.PipelineScheduler'"),
        ({"load_format": "dummy"}, "a load_format other than 'auto'"),
        (
            {"additional_config": {"omni": {"max_pixels": "big"}}},
            "max_pixels .a positive integer",
        ),
        ({"pipeline_parallel_size": 2}, "Pipeline Parallelism .* is not supported"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_combinations_refused_at_start(
    room: EngineRoom, folder: Path, options: dict[str, Any], sentence: str
) -> None:
    """``supports_pp = False`` lets vLLM refuse a pipeline of ranks before it starts any."""
    settings = (
        pipeline_args() | {"max_model_len": 2048, "additional_config": {}} | options
    )
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        room.start(model=str(folder), **settings)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(llm: Any, direct: Any, level: int) -> None:
    llm.sleep(level=level)
    assert executor(llm).is_sleeping and (executor(llm).pipe is None) == (level == 2)
    llm.wake_up()
    (images,) = encode(llm, [REQUESTS[3] | {"output_type": "pt"}])
    assert torch.equal(images, direct(REQUESTS[3]))


def test_device_and_dtype_are_the_engines(llm: Any) -> None:
    pipe = executor(llm).pipe
    assert pipe.dtype == torch.float32 and pipe.device.type == "cpu"
    with pytest.raises(NotImplementedError, match="no add_lora"):
        llm.collective_rpc("add_lora")


def test_concurrent_requests_in_another_process(folder: Path, direct: Any) -> None:
    """AsyncLLM: sixteen at once, one of them aborted midway, all others as if alone."""
    from vllm import AsyncEngineArgs, PoolingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from dllm_plugin.omni import tensor_of
    from dllm_plugin.omni.images import ImageProcessor

    slow = REQUESTS[5] | {"num_inference_steps": 900}
    requests = [slow if i == 5 else r for i, r in enumerate(REQUESTS)]
    wished = [request | {"output_type": "pt"} for request in requests]
    inputs = ImageProcessor.pre_process(None, wished)  # type: ignore[arg-type]

    async def one(engine: Any, i: int) -> Any:
        wish = PoolingParams(task="plugin")
        async for output in engine.encode(inputs[i], wish, request_id=str(i)):
            final = output
        return final

    async def run() -> list[Any]:
        settings = {"model": str(folder), "dtype": "float32", "max_model_len": 2048}
        args = AsyncEngineArgs(**settings, enforce_eager=True, **pipeline_args())
        engine = AsyncLLM.from_engine_args(args)
        try:
            tasks = [asyncio.create_task(one(engine, i)) for i in range(16)]
            async with asyncio.timeout(
                60
            ):  # until the long one is among those that run
                totals: list[Any] = []
                while 900 not in totals:
                    (progress,) = await engine.collective_rpc("progress")
                    totals = [total for _, total in progress.values()]
            start = time.monotonic()
            await engine.abort("5")
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - start < 60
            return done
        finally:
            engine.shutdown()

    outputs = asyncio.run(run())
    for i, (request, output) in enumerate(zip(REQUESTS, outputs, strict=True)):
        if i != 5:
            assert torch.equal(tensor_of(output), direct(request))
