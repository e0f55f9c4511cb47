"""Count denoising steps and requests on /metrics, for our architectures only.

vLLM exports its diffusion metrics only if ``ModelConfig.is_diffusion`` holds, which our
models must not set: its front end would then refuse ordinary sampling parameters. The
scheduler's numbers are the same, so this stat logger (entry point group
``vllm.stat_logger_plugins``) passes them to vLLM's own ``SpecDecodingProm``. Histograms of
ours show what each request took, and which widths steps of floating canvases have.

One line every few seconds logs what a server does while requests run.
"""

import logging
import time
from functools import cache

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from dllm_plugin.config.carriers import EndedRequest, StepWidth, unpack_reports
from dllm_plugin.config.decode import get_decode_config, is_ours
from dllm_plugin.decoding.widths import WIDTHS
from dllm_plugin.models import ARCHITECTURES

# `diffuplug serve` prints what this logger takes; elsewhere nobody does.
logger = logging.getLogger("diffuplug")


class StepLog:
    """Count requests, tokens and forwards between two lines."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._requests = self._tokens = self._forwards = 0
        self._since = time.monotonic()

    def observe(self, stats: SchedulerStats) -> None:
        """Count one scheduler step."""
        steps = stats.spec_decoding_stats
        if steps is None:
            return
        waiting_or_running = stats.num_running_reqs + stats.num_waiting_reqs
        self._requests = max(self._requests, waiting_or_running, steps.num_drafts)
        self._tokens += steps.num_accepted_tokens
        self._forwards += steps.num_drafts

    def log(self) -> None:
        """Log a line, if there were forwards since the last call."""
        seconds = time.monotonic() - self._since
        if self._forwards and seconds > 0:
            logger.info(
                "up to %d requests at once, %.1f tokens/s, %.2f tokens per forward",
                self._requests,
                self._tokens / seconds,
                self._tokens / self._forwards,
            )
        self._start()


LABELS = ["model_name", "engine"]


@cache
def request_metrics() -> dict[str, Histogram]:
    """Register histograms of what requests took, once in a process; buckets are powers of two."""
    found = {}
    for name, documentation, low, high in (
        ("forwards", "Forwards of a request.", 0, 12),
        ("tokens_per_forward", "Its tokens per forward.", -3, 8),
        ("positions_per_token", "Its computed positions per token.", 0, 14),
    ):
        found[name] = Histogram(
            f"diffuplug:request_{name}",
            documentation,
            [*LABELS, "reason"],
            buckets=[2.0**power for power in range(low, high + 1)],
        )
    return found


def observe_request(request: EndedRequest, labels: list[object]) -> None:
    """Count a request that ended; ratios leave out requests without a forward."""
    forwards, tokens = request.forwards, request.tokens
    values: dict[str, float] = {"forwards": forwards}
    if forwards:
        values["tokens_per_forward"] = tokens / forwards
        values["positions_per_token"] = request.positions / max(tokens, 1)
    reason = str(FinishReason(request.reason))
    for name, value in values.items():
        request_metrics()[name].labels(*labels, reason).observe(value)


@cache
def width_metrics() -> tuple[Histogram, Counter, dict[str, Gauge]]:
    """Register widths, their changes and fitted numbers, once in a process."""
    gauges = {}
    for name, documentation in (
        ("acceptance_p0", "Share of first masks, or of drafts, that are accepted."),
        ("acceptance_lambda", "How fast that falls with the rank of a mask."),
        ("step_cost_scale", "Time of steps by what was measured at capture."),
    ):
        gauges[name] = Gauge(
            f"diffuplug:{name}", documentation, LABELS, multiprocess_mode="mostrecent"
        )
    buckets = [float(width) for width in WIDTHS]
    what = "Canvas positions of a step."
    changes = "How often another width was chosen."
    width = Histogram("diffuplug:width", what, LABELS, buckets=buckets)
    return width, Counter("diffuplug:width_changes", changes, LABELS), gauges


def observe_width(step: StepWidth, labels: list[object]) -> None:
    """Count a step of floating canvases."""
    width, changes, gauges = width_metrics()
    width.labels(*labels).observe(step.width)
    changes.labels(*labels).inc(step.changes)
    gauges["acceptance_p0"].labels(*labels).set(step.p0)
    gauges["acceptance_lambda"].labels(*labels).set(step.lam)
    if step.scale:
        gauges["step_cost_scale"].labels(*labels).set(step.scale)


class DenoisingMetrics(AggregateStatLoggerBase):
    """Log the denoising steps of all engines of a front end.

    The counters appear in :meth:`log_engine_initialized`, after every logger has been built:
    vLLM's Prometheus logger is built after the plugins and removes all ``vllm:`` metrics
    that it finds. So counters of an earlier engine in the process cause no duplicates.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None
    ) -> None:
        model_config = vllm_config.model_config
        self.enabled = False
        self._prom: SpecDecodingProm | None = None
        self._has_widths = False
        self._log = StepLog()
        self._labels: dict[int, list[object]] = {}
        if model_config is None or model_config.architecture not in ARCHITECTURES:
            return
        if is_ours(vllm_config):
            self.enabled = True
            method = get_decode_config(vllm_config).method
            self._has_widths = method.floats or method.drafted is not None
            for index in engine_indexes or [0]:
                self._labels[index] = [model_config.served_model_name, str(index)]

    def log_engine_initialized(self) -> None:
        """Register the counters, labelled as all other vLLM metrics are."""
        if not self.enabled or self._prom is not None:
            return
        self._prom = SpecDecodingProm(None, LABELS, self._labels, is_diffusion=True)
        # Zeros are shown before the first request ends.
        for labels in self._labels.values():
            for histogram in request_metrics().values():
                for reason in FinishReason:
                    histogram.labels(*labels, str(reason))
        if self._has_widths:
            width_metrics()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Count one scheduler step of engine `engine_idx`."""
        labels = self._labels.get(engine_idx)
        if self._prom is None or scheduler_stats is None or labels is None:
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is None:
            return
        self._prom.observe(stats, engine_idx)
        self._log.observe(scheduler_stats)
        ended, widths = unpack_reports(stats)
        for request in ended:
            observe_request(request, labels)
        if self._has_widths:
            for step in widths:
                observe_width(step, labels)

    def log(self) -> None:
        """Log requests and tokens since the last call, if there were any."""
        self._log.log()
