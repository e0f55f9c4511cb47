"""Store the times of captured steps in a file: workers measure them, schedulers read them.

They are measured anew whenever graphs are captured. The folder's name says what they depend on: a
model, its numbers and the device. The file's name says with which settings they were measured.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .decode import DecodeConfig

logger = init_logger("vllm.dllm_plugin")

# Of `additional_config`: the path, if full graphs are measured.
KEY = "dllm_step_times"
FOLDER = "dllm_plugin_step_times"


class StepTimes(NamedTuple):
    """Store the times of captured steps.

    positions  computed in a step, of all requests together, ascending
    ms         times at empty contexts, never falling
    per_key    ms of a position of context, each time that it is read
    """

    positions: tuple[int, ...]
    ms: tuple[float, ...]
    per_key: float


def path_for(vllm_config: VllmConfig, config: DecodeConfig) -> Path:
    """Return the path of the step times of this configuration on this machine."""
    scheduler = vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    backend = vllm_config.attention_config.backend
    settings = {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": vllm_config.model_config.max_model_len,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "attention_backend": "auto" if backend is None else backend.name,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    name = ",".join([*words, _hash([settings, config.to_json()])])
    return _folder(vllm_config, config) / f"{name}.json"


def _folder(vllm_config: VllmConfig, config: DecodeConfig) -> Path:
    """Return the folder of the step times of this model and device, for all settings."""
    model = vllm_config.model_config
    facts = [
        *(vllm.__version__, current_platform.get_device_name(), config.kv_cache_layout),
        *(model.model, model.revision, str(model.dtype), model.quantization),
        *(model.quantization_config, config.head_quantization),
    ]
    return Path(envs.VLLM_CACHE_ROOT) / FOLDER / _hash(facts)


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:24]


def newest(vllm_config: VllmConfig, config: DecodeConfig) -> Path | None:
    """Return the file that an engine of this model wrote last on this device, if there is one."""
    files = _folder(vllm_config, config).glob("*.json")
    ordered = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
    return next((file for file in ordered if load(file) is not None), None)


def settings_of(path: Path) -> str:
    """Return the settings of the engine that measured a file's times, to be read."""
    return path.stem.rpartition(",")[0].replace("=", " ").replace(",", ", ")


def own_path(vllm_config: VllmConfig) -> Path | None:
    """Return the path of this engine's step times; None if steps are not measured.

    Engines of data parallelism have a file each: one that starts later begins by deleting its own.
    """
    given: dict[str, Any] = vllm_config.additional_config  # type: ignore[assignment]
    if KEY not in given:
        return None
    path = Path(given[KEY])
    engine = vllm_config.parallel_config.data_parallel_index
    return path.with_stem(f"{path.stem}-{engine}") if engine else path


def save(path: Path, times: StepTimes) -> None:
    """Write the file as a whole, so that no reader finds half of it."""
    content = {
        "ms": dict(zip(times.positions, times.ms, strict=True)),
        "per_key": times.per_key,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Times of an earlier start must not pass for those that cannot be kept.
        path.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(json.dumps(content))
            os.replace(written, path)
    except OSError as error:
        logger.warning("The times of steps were not kept in %s: %s", path, error)


def load(path: Path) -> StepTimes | None:
    """Return the stored times; None if the file is missing or holds no times."""
    try:
        content = json.loads(path.read_text())
        stored = {int(number): float(ms) for number, ms in content["ms"].items()}
        positions = tuple(sorted(stored))
        ms = tuple(stored[number] for number in positions)
        found = StepTimes(positions, ms, float(content["per_key"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("The times of steps in %s are not read: %s", path, error)
        return None
    return found if found.ms and found.ms[0] > 0 and found.per_key >= 0 else None
