"""Start the engines that are measured: ours, and plain vLLM on a model of the same shapes."""

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffuplug_bench.model_shapes import (
    SHAPES,
    W4A16,
    Config,
    autoregressive_config,
    stored_in_4_bits,
    write_config,
)
from diffuplug_bench.request_loop import Ask
from diffuplug_bench.settings import SWITCHES, Settings
from diffuplug_bench.worker_extension import EXTENSION, fill_weights
from dllm_plugin import default_model
from dllm_plugin.commands.offline import (
    BUNDLED_MEMORY,
    one_sentence,
    start_engine,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True}
# Up to so many canvases at once, an engine itself raises vLLM's token budget of a step.
DEFAULT_CANVASES = 64


@dataclass(frozen=True)
class Model:
    """Name the measured model: folder or hub name, config, and whether weights are real."""

    path: str
    config: Config
    is_real: bool
    is_bundled: bool = False


def find_model(settings: Settings, scratch: Path) -> Model:
    """Return the model of the settings; write the config of named shapes below `scratch`."""
    if settings.model is None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
    if settings.shapes is not None:
        config = SHAPES[settings.shapes]
        if settings.quantization == W4A16:
            config = stored_in_4_bits(config)
        return Model(
            write_config(config, scratch / settings.shapes), config, is_real=False
        )
    from transformers import AutoConfig

    import dllm_plugin

    dllm_plugin.register()
    path = settings.model or default_model.path()
    config = AutoConfig.from_pretrained(path).to_dict()
    return Model(path, config, is_real=True, is_bundled=settings.model is None)


def prepare() -> None:
    """Set environment variables that vLLM reads when it builds an engine, once per run."""
    from vllm.platforms import current_platform

    # The gate's reference uses torch's threads first; a forked engine would wait for them forever.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if current_platform.is_cpu():
        # A second process would only take cores from the model.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def on_cpu() -> bool:
    """Return whether vLLM runs on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_compilation(settings: Settings) -> None:
    """Raise ValueError, which names our option, for a compilation config that vLLM refuses."""
    from vllm.config import CompilationConfig

    try:
        CompilationConfig(**(settings.compilation_config or {}))
    except ValueError as error:
        raise ValueError(f"--compilation-config: {one_sentence(error)}") from error
    except KeyError as error:  # vLLM looks the name up in an enumeration
        raise ValueError(
            f"--compilation-config: {error} is unknown to vLLM."
        ) from error


def _common(settings: Settings, length: int, at_once: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "seed": settings.seed,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_model_len": length,
        "max_num_seqs": at_once,
        "disable_log_stats": False,  # as in a server; each step then sends a message
        "worker_extension_cls": EXTENSION,
    }
    if on_cpu() or settings.shapes in (None, "tiny") and settings.model is None:
        options |= BUNDLED_MEMORY
    names = ("gpu_memory_utilization", "kv_cache_memory_bytes")
    return options | settings.given(*names) | precision(settings)


def precision(settings: Settings) -> dict[str, Any]:
    """Return vLLM's options of the asked precision; weights stored in 4 bits need none."""
    names = ["kv_cache_dtype"]
    if settings.quantization != W4A16:
        names.append("quantization")
    return settings.given(*names)


def start_ours(
    settings: Settings,
    model: Model,
    canvas: int,
    length: int,
    trace: Path | None = None,
) -> "LLM":
    """Start our engine for canvases of `canvas` positions in a context of `length`."""
    return start(settings, options_of_ours(settings, model, canvas, length, trace))


def with_dtype(settings: Settings, model: Model, length: int) -> Settings:
    """Return the settings with the dtype of our engine, which floor and baselines share.

    Raises ValueError for what vLLM refuses, before anything is measured.
    """
    from vllm.engine.arg_utils import EngineArgs

    options = options_of_ours(settings, model, settings.canvas[0], length)
    return replace(
        settings, dtype=_dtype_of(EngineArgs(**options).create_engine_config())
    )


def options_of_ours(
    settings: Settings,
    model: Model,
    canvas: int,
    length: int,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Return keyword arguments of ``vllm.LLM`` for our engine."""
    most = max(settings.grid_requests(canvas))
    options = _common(settings, length, most) | {"model": model.path}
    options["additional_config"] = {"dllm": settings.dllm(canvas)}
    if settings.measured.full_attention:
        options["cudagraph_metrics"] = True  # counts positions in a step's message
    if not model.is_real:
        options |= DUMMY
    options |= settings.given("attention_backend", "compilation_config")
    if most > DEFAULT_CANVASES:
        options["max_num_batched_tokens"] = _budget(settings, length + most * canvas)
    return options | _profiler(trace)


def _profiler(trace: Path | None) -> dict[str, Any]:
    """Return the options of an engine whose steps can be traced into a folder, if any."""
    if trace is None:
        return {}
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(trace),
        "torch_profiler_activities": ["CUDA"],  # less work for the host
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return {"profiler_config": profiler}


def _budget(settings: Settings, needed: int) -> int:
    """Return tokens per step: at least vLLM's default, by which plain vLLM takes its prompts."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    defaults, _ = EngineArgs.get_batch_defaults(settings.tensor_parallel_size)
    return max(defaults[UsageContext.LLM_CLASS], needed)


def start_autoregressive(
    settings: Settings,
    model: Model,
    length: int,
    scratch: Path,
    compiled: bool,
    trace: Path | None = None,
) -> "LLM":
    """Start plain vLLM with its own defaults and dummy weights, in the sizes of `model`.

    `compiled` says whether our engine is: on a CPU plain vLLM compiles what ours does not. Sizes of
    CUDA graphs are those of our engine, if they are given.
    """
    config = autoregressive_config(model.config)
    if settings.quantization == W4A16:
        config = stored_in_4_bits(config)
    folder = write_config(config, scratch / "autoregressive")
    options = _common(settings, length, max(settings.requests)) | DUMMY
    options["model"] = folder
    if on_cpu() and not compiled:
        options["enforce_eager"] = True
    sizes = (settings.compilation_config or {}).get("cudagraph_capture_sizes")
    if sizes is not None:
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return start(settings, options | _profiler(trace))


def start(settings: Settings, options: dict[str, Any]) -> "LLM":
    """Start an engine; dummy weights are filled."""
    llm = start_engine(options)
    if options.get("load_format") == "dummy":
        fill_weights(llm, settings.seed)
    return llm


def describe(llm: "LLM") -> dict[str, Any]:
    """Return the engine's choices for the JSON line."""
    from vllm.config import CompilationMode

    config = llm.llm_engine.vllm_config
    backend, compilation = config.attention_config.backend, config.compilation_config
    graphs, mode = compilation.cudagraph_mode, compilation.mode
    compiles = mode == CompilationMode.VLLM_COMPILE
    blocks = config.cache_config.num_gpu_blocks or 0
    return {
        "architecture": config.model_config.architecture,
        "dtype": _dtype_of(config),
        "quantization": config.model_config.quantization,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "head_quantization": decoding(llm).get("head_quantization"),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": config.scheduler_config.async_scheduling,
        **{name: decoding(llm).get(name) for name in SWITCHES},
        "attention_backend": backend.name if backend else "vLLM's choice",
        "cudagraph_mode": graphs.name if graphs else "NONE",
        "cudagraph_capture_sizes": compilation.cudagraph_capture_sizes,
        "compilation_mode": "NONE" if mode is None else mode.name,
        # Only vLLM's own compilation compiles for single sizes.
        "compile_sizes": (compilation.compile_sizes or []) if compiles else [],
        "kv_cache_tokens": blocks * config.cache_config.block_size,
    }


def _dtype_of(config: "VllmConfig") -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def decoding(llm: "LLM") -> dict[str, Any]:
    """Return the decode options as the engine resolved them; plain vLLM has none."""
    given = llm.llm_engine.vllm_config.additional_config
    return given.get("dllm", {}) if isinstance(given, dict) else {}


class Prompts:
    """Generate random prompts, never the same twice, so that no prefix is cached."""

    def __init__(self, config: Config, seed: int) -> None:
        self._random = random.Random(seed)
        self._top: int = config["vocab_size"]
        for name in ("mask_token_id", "eos_token_id"):
            token_id = config.get(name)
            if isinstance(token_id, int):
                self._top = min(self._top, token_id)

    def take(self, length: int) -> list[int]:
        """Return token ids below every special token."""
        return [self._random.randrange(self._top) for _ in range(length)]

    def ask(self, length: int, **sampling: Any) -> Ask:
        """Return a request that is decoded up to `max_tokens`."""
        return Ask(self.take(length), {"ignore_eos": True} | sampling)

    def several(self, count: int, length: int, **sampling: Any) -> list[Ask]:
        """Return `count` such requests."""
        return [self.ask(length, **sampling) for _ in range(count)]
