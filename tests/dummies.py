"""The engines that the benchmark starts for shapes without a checkpoint."""

from pathlib import Path
from typing import Any

from diffuplug_bench import engines
from diffuplug_bench.cli import build_parser
from diffuplug_bench.options import settings_of

WHOSE = ("ours", "plain vLLM")


def without_checkpoint(whose: str, folder: Path) -> Any:
    """One of `WHOSE`, of the tiny shapes; `folder` takes its config."""
    arguments = [
        "step",
        "--shapes",
        "tiny",
        "--context",
        "64",
        "--enforce-eager",
    ]
    settings = settings_of(build_parser().parse_args(arguments))
    engines.prepare()
    model = engines.find_model(settings, folder)
    if whose == "ours":
        return engines.start_ours(settings, model, 32, 256)
    return engines.start_autoregressive(settings, model, 256, folder, compiled=True)


def worker_of(engine: Any) -> Any:
    """The worker of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
