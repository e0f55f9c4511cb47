"""Read D2F adapters (LoRA in PEFT's layout) and merge them into the base weights at load.

The merge sees checkpoint names and full matrices, before renaming, packing and sharding. So it is
the same under tensor parallelism and for packed query/key/value projections.

Adapters that requests choose by name are checked as strictly as the one merged at load:
vLLM takes an adapter of another base, or with matrices missing, and answers worse without a word.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig

from dllm_plugin.config.validation import shown
from dllm_plugin.decoding.method import Method

from .trained_for import model_names
from .weights import Shapes, Weights, is_plain, module_of

# These loaders read sharded files into parameters and never call `load_weights`.
FORMATS_WITHOUT_MERGE = (
    "ipc_cache",
    "runai_streamer_sharded",
    "sharded_state",
    "tensorizer",
)
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PATTERN_SECONDS = 0.5  # for all patterns and modules of an adapter
TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")

# PEFT options that change the merge: key -> the only value, besides None, that we merge.
FIXED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
    "modules_to_save": [],
    "layers_to_transform": [],
    "layers_pattern": [],
    "layer_replication": [],
    "exclude_modules": [],
    "target_parameters": [],
    "trainable_token_indices": [],
    "alora_invocation_tokens": [],
}


@dataclass(frozen=True)
class LoraPair:
    """Store the low-rank update of one matrix [out, in]: `scale * b @ a`."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """Store a checked adapter; keys of `pairs` are module names of the base checkpoint."""

    path: Path
    base_name: str
    targets: tuple[str, ...]
    pairs: dict[str, LoraPair]


def adapter_folder(path: str) -> Path:
    """Return `path` if it is a directory, otherwise a local copy of that repository of the Hub.

    Raises ValueError if there is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        files = [CONFIG_FILE, WEIGHTS_FILE]
        return Path(snapshot_download(path, allow_patterns=files))
    # OSError: every network and cache failure.
    except (HFValidationError, OSError) as error:
        raise ValueError(
            f"lora_path '{path}' is neither a directory nor a repository that can be fetched."
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """Read adapter_config.json in `path`; raise ValueError if we cannot merge such an adapter."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"Adapter '{path}' holds no {CONFIG_FILE}: PEFT's format is needed."
        )
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"Cannot read '{file}': it is not valid JSON ({error})."
        ) from error
    for key, supported in FIXED.items():
        value = config.get(key)
        if value is not None and value != supported and (value or supported):
            raise ValueError(
                f"Adapter '{path}' has {key}={value!r}; only {key}={supported!r} can be merged."
            )
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise ValueError(
            f"Adapter '{path}' has target_modules={targets!r}; a list of module names is needed."
        )
    return config


def is_module(pattern: str, module: str, seconds: float, where: str) -> bool:
    """Return whether a pattern of an adapter's config is that of a module.

    Raises ValueError, which begins with `where`, after some seconds: a pattern can take
    exponential time.
    """
    try:
        found = regex.fullmatch(rf"(.*\.)?({pattern})", module, timeout=seconds)
    except regex.error as error:
        raise ValueError(
            f"{where}, which is no regular expression: {error}."
        ) from error
    except TimeoutError:
        raise ValueError(
            f"{where}: matching the names of modules took longer than {PATTERN_SECONDS:g} "
            "seconds. Write the names out."
        ) from None
    return found is not None


def load_adapter(path: Path) -> LoraAdapter:
    """Read and check the adapter in directory `path`.

    Raises ValueError, with the file, key or tensor, for an adapter that cannot be merged exactly.
    """
    config = read_config(path)
    file = path / WEIGHTS_FILE
    if not file.is_file():
        raise ValueError(f"Adapter '{path}' holds no {WEIGHTS_FILE}.")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"Cannot read '{file}': it is truncated or damaged ({error})."
        ) from error
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"Adapter '{path}' holds '{name}', which is no LoRA matrix."
            )
        halves.setdefault(match[1], {})[match[2]] = tensor
    deadline, pairs = time.monotonic() + PATTERN_SECONDS, {}

    def value(name: str, module: str, default: Any) -> Any:
        """Return the value for a module; as in PEFT, the first match wins."""
        for key, value in (config.get(name) or {}).items():
            where = f"Adapter '{path}' has, in {name} of {CONFIG_FILE}, {shown(key)}"
            left = max(deadline - time.monotonic(), 1e-3)
            if is_module(key, module, left, where):
                return value
        return default

    for module, half in halves.items():
        rank = value("rank_pattern", module, config.get("r", 8))
        alpha = value("alpha_pattern", module, config.get("lora_alpha", 8))
        a, b = checked_half(path, module, half, rank)
        root = math.sqrt(rank) if config.get("use_rslora") else rank
        pairs[module] = LoraPair(a, b, alpha / root)
    base_name = str(config.get("base_model_name_or_path") or "")
    return LoraAdapter(path, base_name, tuple(config["target_modules"]), pairs)


def checked_half(
    path: Path, module: str, half: dict[str, Tensor], rank: int
) -> tuple[Tensor, Tensor]:
    """Return both matrices of a module; raise ValueError if one is missing or has another rank."""
    for letter in "AB":
        if letter not in half:
            raise ValueError(f"Adapter '{path}' has no lora_{letter} for '{module}'.")
    a, b = half["A"], half["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(
            f"Adapter '{path}' has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} for "
            f"'{module}', but rank {rank} in {CONFIG_FILE}."
        )
    return a, b


def check_adapter(vllm_config: VllmConfig, path: str | None) -> None:
    """Raise ValueError if the adapter of `lora_path` cannot be merged into the model.

    The loader has to pass the base's own full matrices.
    """
    if path is None:
        return
    model_config, reason = vllm_config.model_config, ""
    load_format = vllm_config.load_config.load_format
    if load_format in FORMATS_WITHOUT_MERGE:
        reason = f"load_format={load_format!r} reads ready-made parameters"
    if model_config.model_arch_config.quantization_config is not None:
        reason = "the checkpoint is already quantised"
    if reason:
        raise ValueError(
            f"Cannot merge lora_path '{path}': {reason}; serve the unquantised base model "
            "from its original safetensors files."
        )
    read_adapter(path, model_config)


def read_adapter(
    path: str, model_config: ModelConfig, shapes: Shapes | None = None
) -> LoraAdapter:
    """Read an adapter; raise ValueError unless it was trained on the served model.

    With the shapes of the model's tensors, all of it has to fit them.
    """
    adapter = load_adapter(adapter_folder(path))
    config = model_config.hf_config
    names = (model_config.model, config._name_or_path, config.source_name)
    check_base(adapter, names)
    if shapes is not None:
        check_coverage(adapter, shapes)
    return adapter


def check_base(adapter: LoraAdapter, served: Iterable[str | None]) -> None:
    """Raise ValueError unless the adapter was trained on the model that is served.

    `served` are the names of this model (model argument, name in its config). With an adapter of
    another base the model still answers, only worse, so nobody would notice.
    """
    names = [name for name in served if name]
    known = set().union(*(model_names(name) for name in names))
    if adapter.base_name and model_names(adapter.base_name) & known:
        return
    raise ValueError(
        f"Adapter '{adapter.path}' was trained on '{adapter.base_name or 'an unnamed model'}', "
        f"but the model served is '{names[0] if names else ''}': serve that base model, or, if "
        "it is the same model under another name, correct base_model_name_or_path in "
        f"{CONFIG_FILE}."
    )


def check_coverage(adapter: LoraAdapter, shapes: Shapes) -> None:
    """Raise ValueError unless the adapter updates exactly its target modules in every layer."""
    wanted: dict[str, tuple[int, ...]] = {}
    for target in adapter.targets:
        is_there = False
        for name, shape in shapes.items():
            module = module_of(name)
            if len(shape) == 2 and f".{module}".endswith(f".{target}"):
                wanted[module], is_there = shape, True
        if not is_there:
            raise ValueError(
                f"Adapter '{adapter.path}' targets '{target}', a module this model does not have."
            )
    for module, matrix in wanted.items():
        if module not in adapter.pairs:
            raise ValueError(
                f"Adapter '{adapter.path}' has no matrices for '{module}': "
                f"{len(adapter.pairs)} of {len(wanted)} target modules are there."
            )
        pair = adapter.pairs[module]
        found = (pair.b.shape[0], pair.a.shape[1])
        if found != matrix:
            raise ValueError(
                f"Adapter '{adapter.path}' updates '{module}' as {found}, but the weight is "
                f"{matrix}."
            )
    surplus = [module for module in adapter.pairs if module not in wanted]
    if surplus:
        raise ValueError(
            f"Adapter '{adapter.path}' has matrices for '{min(surplus)}', which is none of its "
            f"target modules {list(adapter.targets)} in this model."
        )


def merge(weights: Weights, adapter: LoraAdapter) -> Iterator[tuple[str, Tensor]]:
    """Replace each adapted W in the stream by `W + scale * B @ A`, in W's dtype.

    The sum is computed in float32. Raises ValueError at the end of the stream if an update found no
    weight.
    """
    waiting = dict(adapter.pairs)
    for name, weight in weights:
        module = module_of(name)
        if module not in waiting or not name.endswith(".weight"):
            yield name, weight
            continue
        if not is_plain(weight):
            raise ValueError(
                f"Cannot merge adapter '{adapter.path}' into '{name}': it is stored "
                f"quantised ({weight.dtype}); serve the unquantised base model."
            )
        pair = waiting.pop(module)
        delta = pair.b.float() @ pair.a.float()
        merged = weight.float() + pair.scale * delta.to(weight.device)
        yield name, merged.to(weight.dtype)
    if waiting:
        raise ValueError(
            f"{len(waiting)} of {len(adapter.pairs)} updates of adapter '{adapter.path}' found no "
            f"weight; the first is '{next(iter(waiting))}'."
        )


D2F_NAME = re.compile(r"(?<![a-z0-9])d2f(?![a-z0-9])", re.IGNORECASE)
IN_A_LAYER = re.compile(r"\.\d+\.")


def check_layers_alone(adapter: LoraAdapter) -> None:
    """Raise ValueError if the adapter updates the embedding or the LM head."""
    for module in adapter.pairs:
        if not IN_A_LAYER.search(module):
            raise ValueError(
                f"Adapter '{adapter.path}' updates '{module}', which lies in no layer: requests "
                "can choose updates only of layers. Merge it by lora_path."
            )


def check_strategy(adapter: LoraAdapter, name: str, method: Method) -> None:
    """Raise ValueError if the adapter's name shows that it was trained for another strategy."""
    names: Iterable[str] = {name, *model_names(adapter.path)}
    if not method.uses_adapter and any(map(D2F_NAME.search, names)):
        raise ValueError(
            f"Adapter '{name}' was trained for the strategy 'd2f', as the name of '{adapter.path}' "
            f"says, but this engine decodes by '{method.strategy}': set strategy to 'd2f', or give "
            "the adapter another name."
        )
