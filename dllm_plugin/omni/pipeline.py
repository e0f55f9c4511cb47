"""Run a diffusers pipeline in the engine's process, as an executor without workers.

Each running request has a thread that calls the pipeline as usual. After a denoising step the
pipeline's callback waits for the engine's next step. So one thread runs at a time, and aborts
are seen.
"""

import copy
import inspect
import json
import secrets
import threading
import traceback
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from . import check_scheduler, option, pipeline_args, refusal, refuse
from .diffusion import TASK
from .images import check_request

logger = init_logger("vllm.dllm_plugin.omni")
# Questions that vLLM asks its workers, with the answers of a model without a KV cache.
LAYOUTS = [layout.name for layout in get_supported_kv_cache_layouts([])]
ANSWERS: dict[str, Any] = {
    "get_kv_cache_spec": {},
    "get_supported_kv_cache_layouts": LAYOUTS,
    "get_supported_tasks": (TASK,),
    "compile_or_warm_up_model": CompilationTimes(0, 0),
    "initialize_from_config": None,
    "set_kv_cache_layout": None,
    "synchronize_device": None,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "supports_draft_weight_updates": None,
}
CALLS = ("sleep", "wake_up", "progress")


class Job(AbstractContextManager[Any]):
    """Call a pipeline in a daemon thread, one denoising step at a time."""

    def __init__(self, call: Any) -> None:
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self.step = 0
        self.total = None
        self.ended = False
        self._cancelled = False
        self.result, self.error = torch.empty(0), ""
        threading.Thread(target=self._main, args=(call,), daemon=True).start()

    def _main(self, call: Any) -> None:
        with self:
            self._wait()
            self.result = call(self)
        self.ended = True
        self._stopped.release()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """Keep an error as text, without its frames; it ends only this request."""
        if error is not None:
            self.result = refusal(f"{type(error).__name__}: {error}")
            self.error = "".join(traceback.format_exception(error))
        return True

    def _wait(self) -> None:
        self._go.acquire()
        if self._cancelled:
            raise SystemExit  # leaves the pipeline

    def after_step(
        self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]
    ) -> Any:
        self.step = step + 1
        self.total = getattr(pipe, "num_timesteps", None)
        self._stopped.release()
        self._wait()
        return tensors

    def advance(self, cancel: bool = False) -> None:
        """Run to the next callback or the end; `cancel` ends the call at once."""
        self._cancelled = cancel
        self._go.release()
        self._stopped.acquire()


class DiffusersPipelineExecutor(Executor):
    """Run the pipeline's requests; selected by :func:`dllm_plugin.omni.pipeline_args`."""

    supports_pp = False

    def _init_executor(self) -> None:
        name = type(self).__name__
        parallel = self.parallel_config
        model = self.model_config
        check_scheduler(name, self.vllm_config, pipeline_args()["scheduler_cls"])
        option(self.vllm_config, "max_pixels")  # raises for a wrong value
        # Its size became 1.
        size = max(parallel.world_size, parallel.data_parallel_index + 1)
        faults = {
            f"runner={model.runner_type!r}; use 'pooling'": model.runner_type
            != "pooling",
            "tensor, pipeline or data parallelism": size > 1,
            f"quantization={model.quantization!r}": model.quantization,
            "a load_format other than 'auto'": self.load_config.load_format != "auto",
            "LoRA adapters": self.lora_config,
            "speculative decoding": self.speculative_config,
        }
        refuse(name, faults)
        self.device = torch.device(self.device_config.device_type)
        self.requests: dict[str, tuple[Any, int]] = {}  # JSON as bytes, default seed
        self.jobs: dict[str, Job] = {}
        self._load()

    def _load(self) -> None:
        from diffusers import DiffusionPipeline, SchedulerMixin

        model = self.model_config
        pipe = DiffusionPipeline.from_pretrained(
            model.model,
            trust_remote_code=model.trust_remote_code,
            cache_dir=self.load_config.download_dir,
            revision=model.revision,
            torch_dtype=model.dtype,
        )
        self.pipe = pipe.to(self.device)
        self.pipe.set_progress_bar_config(disable=True)
        self.accepts = inspect.signature(self.pipe.__call__).parameters
        self.schedulers = []
        nested = False
        for name, component in vars(self.pipe).items():
            if isinstance(component, SchedulerMixin):
                self.schedulers.append(name)
            nested = nested or isinstance(component, DiffusionPipeline)
        blind = "callback_on_step_end" not in self.accepts
        faults = {
            "max_num_seqs > 1": nested and self.scheduler_config.max_num_seqs > 1,
            "aborts, without callback_on_step_end": blind,
        }
        refuse(type(self.pipe).__name__, faults)

    def collective_rpc(  # type: ignore[override]
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
        **_: Any,
    ) -> Any:
        """Answer a question of ANSWERS, run one of CALLS, or call a function with this executor."""
        if method in ANSWERS:
            return [ANSWERS[method]]
        if isinstance(method, str) and method not in CALLS:
            raise NotImplementedError(
                f"A diffusers pipeline has no {method}; it has {CALLS}."
            )
        call = getattr(type(self), "_" + method) if isinstance(method, str) else method
        return [call(self, *args, **(kwargs or {}))]

    def check_health(self) -> None:
        """Do nothing: the pipeline is in the engine's process and fails with it."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run one denoising step of every request; return the images of those that are done."""
        for req_id in scheduler_output.finished_req_ids:
            self._forget(req_id)
        # Kept, because sleep level 2 restarts it.
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = new.prompt_token_ids, secrets.randbits(63)
        ids = list(scheduler_output.num_scheduled_tokens)
        places = {req_id: i for i, req_id in enumerate(ids)}
        images = [self._advance(req_id) for req_id in ids]
        output = ModelRunnerOutput(ids, places, pooler_output=images)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output if ids else EMPTY_MODEL_RUNNER_OUTPUT)
        return future if non_block else future.result()

    def _progress(self) -> dict[str, tuple[int, int | None]]:
        return {req_id: (job.step, job.total) for req_id, job in self.jobs.items()}

    def _advance(self, req_id: str) -> torch.Tensor | None:
        if req_id not in self.jobs:
            prompt, seed = self.requests[req_id]
            self.jobs[req_id] = Job(lambda job: self._call(job, prompt, seed))
        job = self.jobs[req_id]
        job.advance()
        if not job.ended:
            words = "Image request %s: denoising step %s of %s."
            logger.info(words, req_id, job.step, job.total)
            return None
        self._forget(req_id)
        if job.error:
            logger.error("Image request %s failed:\n%s", req_id, job.error)
        return job.result

    def _forget(self, req_id: str) -> None:
        self.requests.pop(req_id, None)
        job = self.jobs.pop(req_id, None)
        if job is not None and not job.ended:
            job.advance(cancel=True)

    def _call(self, job: Job, prompt: Any, seed: int) -> torch.Tensor:
        """Return images as uint8 ``[n, height, width, 3]``, or float32 by `output_type`."""
        request = json.loads(bytes(prompt))
        check_request(request, self.vllm_config)
        seed = request.pop("seed", seed)
        kind = request.pop("output_type", "pil")
        generator = torch.Generator("cpu").manual_seed(seed)
        options = {"generator": generator, "return_dict": False}
        for name in request:
            ours = name in options or name.startswith("callback")
            if ours or name not in self.accepts:
                raise ValueError(f"{type(self.pipe).__name__} takes no {name}.")
        # Calls keep state in the pipeline and its schedulers.
        pipe = copy.copy(self.pipe)
        for name in self.schedulers:
            setattr(pipe, name, copy.deepcopy(getattr(pipe, name)))
        request["output_type"] = "pt" if kind == "pil" else kind
        options["callback_on_step_end"] = job.after_step
        images = pipe(**request, **options)[0].float().cpu()
        if kind == "pil":
            images = (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8)
        return images.detach().contiguous()

    def _sleep(self, level: int) -> None:
        if level == 1:
            self.pipe.to("cpu")
        else:  # drops the weights and all running calls
            for job in self.jobs.values():
                job.advance(cancel=True)
            self.jobs, self.pipe = {}, None
        torch.cuda.empty_cache()

    def _wake_up(self, tags: list[str] | None = None) -> None:
        if self.pipe is None:
            self._load()
        self.pipe.to(self.device)

    def shutdown(self) -> None:
        self._sleep(level=2)
