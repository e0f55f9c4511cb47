"""Run ``diffuplug doctor``: print what is installed, and what is chosen for a model and why."""

import platform
from typing import Any, NamedTuple

import torch
import vllm
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.usage.usage_lib import UsageContext

import dllm_plugin
from dllm_plugin.attention.backends import REASONS, backend_name
from dllm_plugin.config.cuda_graphs import (
    allowed_widths,
    captured_graphs,
    refresh_lengths,
)
from dllm_plugin.config.decode import DecodeConfig, get_decode_config
from dllm_plugin.config.memory import reserved_bytes, step_size, usable_bytes
from dllm_plugin.config.options import REQUEST_FIELDS, does_nothing
from dllm_plugin.config.request.exclusions import OF_SEVERAL_BLOCKS
from dllm_plugin.config.request.parsing import request_arguments
from dllm_plugin.config.step_times import KEY, newest, settings_of
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.decoding.widths import widths_between
from dllm_plugin.models import ARCHITECTURES
from dllm_plugin.models.checkpoints.sizes import (
    EIGHT_BITS,
    GRAPHS,
    LIBRARIES,
    kv_item_bytes,
    layer_bytes,
    sizes_of,
)
from dllm_plugin.models.checkpoints.step_costs import step_costs
from dllm_plugin.models.checkpoints.trained_for import find_mask_token

from .forecast import Load, forecast
from .models import is_elsewhere, read_config, refuse_unserved
from .offline import missing_device, one_sentence


def run(options: dict[str, Any], load: Load | None = None) -> int:
    """Print the report; 0 when the model could be served, 1 otherwise."""
    taken = " and ".join(
        f"{major}.{minor}.x" for major, minor in dllm_plugin.SUPPORTED_VLLM
    )
    _line("diffuplug", dllm_plugin.__version__)
    _line("vLLM", f"{vllm.__version__} (supported: {taken})")
    _line("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    if (problem := missing_device()) is not None:
        _line("problem", problem)
        return 1
    device = current_platform.get_device_name()
    _line(
        "platform", f"{current_platform.device_name} ({device or platform.processor()})"
    )
    _line("kernels", "Triton" if HAS_TRITON else "torch (no Triton on this platform)")
    dllm_plugin.register()
    known = vllm.ModelRegistry.get_supported_archs()
    missing = sorted(set(ARCHITECTURES) - set(known))
    _line("registered", ", ".join(sorted(set(ARCHITECTURES) & set(known))) or "nothing")
    if missing:
        _line("NOT registered", ", ".join(missing))
    print()
    failed = _report_model(options)
    if load is not None and not failed:
        _report_width(options, load)
    return failed or bool(missing)


def _report_width(options: dict[str, Any], load: Load) -> None:
    """Print the width that `adaptive` would choose for a load, and its speed."""
    given = options["additional_config"]["dllm"]
    dllm = {"adaptive": "throughput"} | given
    try:
        vllm_config = _engine_config(options | {"additional_config": {"dllm": dllm}})
    except ValueError as error:
        _line("width", f"none: {one_sentence(error)}")
        return
    config = get_decode_config(vllm_config)
    widths = widths_between(config.min_window, config.max_window)
    allowed = allowed_widths(vllm_config, config, widths)
    costs = "a model of large GPUs"
    if (path := newest(vllm_config, config)) is not None:
        vllm_config.additional_config[KEY] = str(path)  # type: ignore[index]
        costs = f"measured on this machine, with {settings_of(path)}"
    found = forecast(config, load, step_costs(vllm_config, config), allowed)
    how = "" if config.adaptive == "throughput" else f" {config.adaptive!r}"
    between = f"{config.min_window} to {config.max_window}"
    _line("width", f"{found.width} of {between}, with adaptive{how}")
    if "adaptive" not in given:  # else they are part of the report
        _report_graphs(vllm_config, config)
    _line("  tokens per forward", f"{found.tokens:.2f} of each request")
    _line("  step costs", costs)
    step_ms = 1.0 if found.measured else load.step_ms
    what = "tokens/s" if step_ms else "tokens in a small step's time"
    unit = 1000 / step_ms if step_ms else 1.0
    widest = f"at width {config.max_window}: {unit * found.widest:.1f}"
    _line("  " + what, f"{unit * found.rate:.1f} ({widest})")


def _engine_config(options: dict[str, Any]) -> VllmConfig:
    """Return the configuration of a server, whose limits are larger than vLLM's without a use."""
    return EngineArgs(**options).create_engine_config(UsageContext.OPENAI_API_SERVER)


def _report_graphs(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Print the lengths of forwards that would have full CUDA graphs, if there are any."""
    graphs = captured_graphs(vllm_config, config)
    what = "width" if config.method.floats else "forwards of"
    for length, counts in sorted(graphs.items()):
        _line(
            f"  {what} {length}",
            f"for up to {counts[-1]} requests, {len(counts)} graphs",
        )
    if graphs and config.method.full_attention:
        near = ", ".join(map(str, sorted(refresh_lengths(config) & graphs.keys())))
        full = f", full ones within an answer, of {near} positions" if near else ""
        _line("  refreshes", f"piecewise graphs{full}")


def _report_model(options: dict[str, Any]) -> int:
    model = options["model"]
    _line("model", model)
    try:
        if not is_elsewhere(model):
            refuse_unserved(model, read_config(model))
        vllm_config = _engine_config(options)
    except (ValueError, OSError) as error:
        _line("problem", one_sentence(error))
        return 1
    model_config = vllm_config.model_config
    architecture = model_config.architecture
    if architecture not in ARCHITECTURES:
        _line(
            "problem",
            f"{architecture} is not served by DiffuPlug (vLLM may serve it itself)",
        )
        return 1
    family = FAMILIES[architecture]
    mask_token_id, found_in = find_mask_token(model_config, family)
    config = get_decode_config(vllm_config)
    _line("architecture", f"{architecture}, family {family.name}")
    _line(
        "logits row i",
        "predicts position i + 1" if family.logits_shift else "is position i",
    )
    _line("mask token", f"{mask_token_id}, from {found_in}")
    reason = "as asked"
    if options.get("dtype", "auto") == "auto":  # the hook chooses on some CPUs
        ours: Any = vllm_config.additional_config
        reason = (
            f"auto: {ours.get('dllm_dtype', 'what vLLM takes for this checkpoint')}"
        )
    dtype = f"{model_config.dtype} ({reason})"
    _line("dtype, context", f"{dtype}, {model_config.max_model_len} tokens")
    _line("decoding", f"{config.strategy}, policy {config.policy}: {config.reason}")
    wanted = options["additional_config"]["dllm"].get("kv_cache_layout", "auto")
    _line("KV cache layout", f"{config.kv_cache_layout} ({REASONS[wanted]})")
    for name, value in _settings(config).items():
        _line("  " + name, value)
    _line("attention", backend_name(vllm_config))
    _report_memory(vllm_config, config)
    _line("CUDA graphs", _graphs(vllm_config))
    _report_graphs(vllm_config, config)
    mode = vllm_config.compilation_config.mode
    _line("model compiled", "no" if mode in (None, CompilationMode.NONE) else mode.name)
    _line("step compiled", "yes" if config.compile_step else "no")
    if config.computes_next_block:
        fewest = config.commit_alone_from
        _line("single-block steps", f"from {fewest} requests on" if fewest else "never")
    return 0


class Memory(NamedTuple):
    """Store the bytes that one rank needs."""

    weights: float
    step: float  # logits, their copies, and the tables of features
    forward: float
    graphs: float
    libraries: float
    request: float  # keys and values of one request of the longest context


def memory_of(vllm_config: VllmConfig, config: DecodeConfig) -> Memory:
    """Compute what a rank needs, from the configuration of the model and the engine."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    sizes = sizes_of(model.hf_text_config)
    dtype = model.dtype
    assert isinstance(dtype, torch.dtype)
    packing = model.model_arch_config.quantization_config
    stored = layer_bytes(model.quantization, dtype.itemsize, packing)
    positions = vllm_config.scheduler_config.max_num_batched_tokens
    cached_as = vllm_config.cache_config.cache_dtype
    kept = kv_item_bytes(cached_as, dtype.itemsize)
    # A rank has at least one head, so heads are replicated if there are more ranks.
    share = model.get_num_kv_heads(parallel) / model.get_total_num_kv_heads()
    weights = sizes.weight_bytes(stored, dtype.itemsize)
    if config.head_quantization != "none":
        weights -= sizes.tables / 2 * (dtype.itemsize - EIGHT_BITS)
    return Memory(
        weights=weights / parallel.world_size,
        step=reserved_bytes(step_size(vllm_config, config)),
        forward=positions * sizes.activations * dtype.itemsize,
        graphs=0 if _graphs(vllm_config) == "none" else GRAPHS,
        libraries=0 if current_platform.is_cpu() else LIBRARIES,
        request=model.max_model_len * sizes.kv_values * share * kept,
    )


def _report_memory(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Print whether the model fits, from its configuration, and what to change if not."""
    memory = memory_of(vllm_config, config)
    model = vllm_config.model_config
    usable = usable_bytes(vllm_config)
    weights, request = memory.weights, memory.request
    fixed = memory.graphs + memory.libraries
    room = usable - (weights + memory.step + memory.forward + fixed)
    _line(
        "memory",
        f"weights {_gigabytes(weights)}, a step {_gigabytes(memory.step)}, a forward "
        f"{_gigabytes(memory.forward)}, graphs and libraries {_gigabytes(fixed)}, a request of "
        f"{model.max_model_len} tokens {_gigabytes(request)}, of {_gigabytes(usable)}",
    )
    positions = int(room / request * model.max_model_len)
    if room >= request:
        fitting = int(room // request)
        _line("  fits", f"{fitting} such requests at once, {positions:,} positions")
        return
    _line("  fits", f"no: {_gigabytes(request - room)} are missing")
    smaller = sizes_of(model.hf_text_config).weight_bytes(EIGHT_BITS)
    smaller /= vllm_config.parallel_config.world_size
    if weights - smaller >= request - room:
        _line("  change", f"{in_eight_bits()}: {_gigabytes(smaller)}")
    elif room > 0:
        _line("  change", f"--max-model-len {positions}")
    elif weights < usable:
        _line("  change", "--max-num-seqs, or a checkpoint in four bits")
    else:
        _line("  change", "a checkpoint in four bits, or several GPUs")


def in_eight_bits() -> str:
    """Return what stores weights in 8 bits: CPUs refuse to quantise while they load."""
    if current_platform.is_cpu():
        return "a checkpoint in eight bits"
    return "--quantization fp8_per_channel"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _graphs(vllm_config: VllmConfig) -> str:
    """Describe the CUDA graphs that are captured, and their largest number of positions."""
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode in (None, CUDAGraphMode.NONE):
        return "none"
    most = compilation.max_cudagraph_capture_size
    return f"{compilation.cudagraph_mode.name}, up to {most} positions"


def _settings(config: DecodeConfig) -> dict[str, Any]:
    """Return the request arguments that this strategy and policy read, at their defaults."""
    request = request_arguments(config, {}, config.canvas_length)
    read = config.method.options_read(config.policy) - {"policy"}
    if config.method.next_block and config.max_active_blocks == 1:
        read -= set(OF_SEVERAL_BLOCKS)
    values = {name: getattr(request, name) for name in REQUEST_FIELDS if name in read}
    values |= {"canvas_length": config.canvas_length, "lora_path": config.lora_path}
    if config.whole_canvas:
        values["block_length"] = "the whole canvas"
        values["steps"] = config.steps or "one per position"
    return {k: v for k, v in values.items() if v is not None and not does_nothing(k, v)}


def _line(label: str, value: Any) -> None:
    print(f"{label + ':':<28}{value}")
