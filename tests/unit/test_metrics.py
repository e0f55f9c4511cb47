"""Denoising counters, through vLLM's own manager of stat loggers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerManager, load_stat_logger_plugin_factories
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

import dllm_plugin
from dllm_plugin.config.carriers import EndedRequest, StepWidth, pack_reports
from dllm_plugin.engine.metrics import DenoisingMetrics

LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 64,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "mlp_hidden_size": 128,
    "vocab_size": 320,
    "embedding_size": 320,
    "max_sequence_length": 256,
    "mask_token_id": 300,
    "eos_token_id": 301,
    "torch_dtype": "float32",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
NAMES = ("denoising_steps", "canvas_positions", "committed_tokens")


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    yield
    unregister_vllm_metrics()


def vllm_config(folder: Path, values: dict[str, Any], **dllm: Any) -> VllmConfig:
    """A real configuration of a model that has no weights."""
    dllm_plugin.register()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        served_model_name="m",
        additional_config={"dllm": dllm} if dllm else {},
    ).create_engine_config()


def manager(config: VllmConfig, engines: list[int]) -> StatLoggerManager:
    """What AsyncLLM builds, with the plugins that vLLM finds."""
    factories = load_stat_logger_plugin_factories()
    assert DenoisingMetrics in factories
    built = StatLoggerManager(config, engines, factories, enable_default_loggers=False)
    built.log_engine_initialized()
    return built


def step(
    committed: int, *ended: EndedRequest, width: StepWidth | None = None
) -> SchedulerStats:
    """A scheduler step in which one request with a canvas of 8 committed tokens."""
    stats = SpecDecodingStats(8, 1, 8, committed)
    pack_reports(stats, list(ended), width)
    return SchedulerStats(spec_decoding_stats=stats)


def counters(engine: int) -> list[float | None]:
    """Steps, positions and tokens of an engine on /metrics."""
    labels = {"model_name": "m", "engine": str(engine)}
    return [
        REGISTRY.get_sample_value(f"vllm:diffusion_num_{n}_total", labels)
        for n in NAMES
    ]


def test_counters_per_engine(tmp_path: Path) -> None:
    loggers = manager(vllm_config(tmp_path, LLADA), [0, 1])
    loggers.record(step(3), None, engine_idx=1)
    loggers.record(step(0), None, engine_idx=1)
    loggers.record(SchedulerStats(), None, engine_idx=1)
    assert counters(1) == [2, 16, 3]
    assert counters(0) == [0, 0, 0]
    loggers.log()


def test_a_second_engine_in_the_process_starts_again(tmp_path: Path) -> None:
    config = vllm_config(tmp_path, LLADA)
    manager(config, [0]).record(step(3), None)
    manager(config, [0]).record(step(4), None)
    assert counters(0) == [1, 8, 4]


def test_histograms_of_requests_that_ended(tmp_path: Path) -> None:
    def sums(engine: int, reason: str = "stop") -> list[float | None]:
        labels = {"model_name": "m", "engine": str(engine), "reason": reason}
        samples = (
            REGISTRY.get_sample_value(f"diffuplug:request_{name}_{of}", labels)
            for name in ("forwards", "tokens_per_forward", "positions_per_token")
            for of in ("count", "sum")
        )
        return [*samples]

    loggers = manager(vllm_config(tmp_path, LLADA), [2, 3])
    assert sums(2) == sums(3) == [0] * 6
    stop, abort = FinishReason.STOP, FinishReason.ABORT
    ended = [EndedRequest(stop, 4, 10, 80), EndedRequest(stop, 2, 1, 16)]
    ended += [EndedRequest(abort, 5, 20, 100), EndedRequest(abort, 0, 0, 0)]
    loggers.record(step(3, *ended), None, engine_idx=3)
    loggers.record(step(3), None, engine_idx=3)
    assert sums(3) == [2, 6, 2, 3.0, 2, 24.0] and sums(2) == [0] * 6
    assert sums(3, "abort") == [2, 5, 1, 4.0, 1, 5.0], "one had no forward"
    assert sums(3, "length") == [0] * 6


def test_widths(tmp_path: Path) -> None:
    """Of floating canvases alone; other engines have none of these metrics."""

    def value(name: str, engine: int, **more: str) -> float | None:
        labels = {"model_name": "m", "engine": str(engine)} | more
        return REGISTRY.get_sample_value(f"diffuplug:{name}", labels)

    names = ("width_sum", "width_changes_total", "acceptance_p0", "acceptance_lambda")
    off = manager(vllm_config(tmp_path, LLADA), [4])
    off.record(step(3, width=StepWidth(8, 0, 0.9, 4.0)), None, engine_idx=4)
    assert [value(name, 4) for name in names] == [None] * 4
    unregister_vllm_metrics()
    on = manager(
        vllm_config(tmp_path, LLADA, strategy="d2f", adaptive="throughput"), [5]
    )
    one = EndedRequest(FinishReason.STOP, 4, 10, 80)
    on.record(step(3, one, width=StepWidth(8, 0, 0.9, 4.0)), None, engine_idx=5)
    on.record(step(3, width=StepWidth(6, 1, 0.5, 1.5)), None, engine_idx=5)
    assert [value(name, 5) for name in names] == [14, 1, 0.5, 1.5]
    assert value("request_forwards_count", 5, reason="stop") == 1


def test_nobody_else_reads_the_list_that_carries_them() -> None:
    """Only vLLM's own loop writes `num_draft_tokens_per_pos`, and ours takes its place."""
    root = Path(vllm.__file__).parent
    users = {file.relative_to(root): file.read_text() for file in root.rglob("*.py")}
    found = {
        str(file) for file, text in users.items() if "num_draft_tokens_per_pos" in text
    }
    assert found == {"v1/spec_decode/metrics.py"}
    assert (
        users[Path("v1/spec_decode/metrics.py")].count("num_draft_tokens_per_pos") == 3
    )


def test_unknown_engine_is_ignored(tmp_path: Path) -> None:
    metrics = DenoisingMetrics(vllm_config(tmp_path, LLADA), [0])
    metrics.log_engine_initialized()
    metrics.record(step(3), None, engine_idx=5)
    assert counters(0) == [0, 0, 0]


def test_other_models_get_nothing(tmp_path: Path) -> None:
    loggers = manager(vllm_config(tmp_path, LLAMA), [0])
    loggers.record(step(3), None)
    loggers.log()
    assert counters(0) == [None, None, None]
