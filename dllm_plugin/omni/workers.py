"""Define workers with other model runners than vLLM's; `worker_cls` selects them.

vLLM's CPU worker has no hook for a runner class. So, on all platforms, the class of the runner
that vLLM has just constructed is exchanged: a mixin goes before vLLM's class. No attribute of
vLLM is assigned to.
"""

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from dllm_plugin.engine.platforms import request_tiles

from . import ar_runner, check_scheduler, diffusion, hidden_state_args, refuse

# Importing the CPU worker replaces functions of torch.cuda.
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]


class _Worker(Worker):
    """Run vLLM's worker with another model runner.

    check    raises ValueError with one sentence for settings that do not go together
    runners  mixins for model runner v1 and v2
    """

    check: Any
    runners: tuple[type, type]

    def init_device(self) -> None:
        """Check the settings, initialize as vLLM does, and exchange the runner's class."""
        self.check()
        if current_platform.is_cpu():
            request_tiles(self.model_config)
        super().init_device()
        runner = self.model_runner
        mixin = self.runners[self.use_v2_model_runner]
        runner.__class__ = type(mixin.__name__, (mixin, type(runner)), {})


class ARWorker(_Worker):
    """Generate autoregressively and return hidden states."""

    runners = (ar_runner.HiddenStatesV1, ar_runner.HiddenStatesV2)

    def check(self) -> None:
        """Raise ValueError for settings without hidden states; remove their rules here."""
        needed = hidden_state_args()
        model = self.model_config
        ar_runner.check_generation(self.vllm_config)
        check_scheduler("ARWorker", self.vllm_config, needed["scheduler_cls"])
        (rules,) = needed["logits_processors"]
        given = model.logits_processors or []
        refuse(
            "ARWorker",
            {f"logits_processors={given}; add {rules!r}": rules not in given},
        )
        model.logits_processors = [name for name in given if name != rules] or None


class DiffusionWorker(_Worker):
    """Run non-autoregressive models, without CUDA graphs: no graph contains a denoising loop."""

    runners = (diffusion.DiffusionV1, diffusion.DiffusionV2)

    def check(self) -> None:
        """Raise ValueError unless the engine pools; disable CUDA graphs."""
        kind = self.model_config.runner_type
        use = "use 'pooling', or ARWorker to generate text"
        refuse("DiffusionWorker", {f"runner={kind!r}; {use}": kind != "pooling"})
        self.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
