"""Import what takes long in the template, and note which variables imports asked for."""

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch",
    "torch._dynamo",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
)
ROOT = Path(__file__).parents[2]
OURS = (
    "dllm_plugin.engine.config_hook",
    "dllm_plugin.engine.scheduling.grammar_scheduler",
    "dllm_plugin.engine.worker.cpu_worker",
    "dllm_plugin.api.plugin",
    "dllm_plugin.commands.parsers",  # whose command is run, not imported
)
# Read while libraries are loaded, where Python sees nothing of it.
LIBRARIES = (
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
)
# A fork applies these itself, or vLLM reads them again when an engine starts.
APPLIED = {
    "DIFFUPLUG_COMMAND",  # an import collects rarely below a command; a fork imports no more
    "OMP_NUM_THREADS",
    "PROMETHEUS_MULTIPROC_DIR",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TEMP",
    "TMP",
    "TMPDIR",
    "VLLM_LOGGING_COLOR",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_PREFIX",
    "VLLM_LOGGING_STREAM",
    "VLLM_SERVER_DEV_MODE",  # an import takes a default of --log-error-stack from it
    "VLLM_PLUGINS",  # no platform is a plugin here, which is what an import would ask for
    # What imports of vLLM set for processes: torch's own OpenMP, which this process has, libraries
    # of cv2, how many processes compile, and where, which is read when they are to start.
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
}
ENVIRONMENT = os.environ


class Noting(dict[str, str]):
    """A copy of the environment that knows which variables were asked for by name.

    Who copies all of it asks for none.
    """

    def __init__(self) -> None:
        super().__init__(ENVIRONMENT)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name, value)
        ENVIRONMENT[name] = value

    def setdefault(self, name: str, default: str = "") -> str:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        ENVIRONMENT.pop(name, None)
        return super().pop(name, *default)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del ENVIRONMENT[name]

    def update(self, *others: Any, **more: str) -> None:
        for name, value in dict(*others, **more).items():
            self[name] = value


KEPT = Noting()  # by whoever said `from os import environ`


def import_all() -> set[str]:
    """Import what takes long; return the variables that decided anything."""
    os.environ = KEPT  # type: ignore[assignment]  # noqa: B003
    sys.path.insert(0, str(ROOT))
    for name in IMPORTED + OURS:
        importlib.import_module(name)
    register_kernels()
    sys.path.remove(str(ROOT))
    os.environ = ENVIRONMENT  # noqa: B003
    return KEPT.asked - APPLIED


def register_kernels() -> None:
    """Register vLLM's kernels for the CPU once: each worker would search all modules for them."""
    from vllm.platforms.cpu import CpuPlatform

    with warnings.catch_warnings(action="ignore"):  # of torch's own names
        CpuPlatform.register_triton_kernel_overrides()
    done = classmethod(lambda cls: None)
    CpuPlatform.register_triton_kernel_overrides = done  # type: ignore[assignment]


def is_other_package(pythonpath: str) -> bool:
    """Whether a process with this PYTHONPATH finds another package of ours than the checkout's."""
    for folder in filter(None, pythonpath.split(os.pathsep)):
        if Path(folder, "dllm_plugin").is_dir():
            return Path(folder).resolve() != ROOT.resolve()
    return False
