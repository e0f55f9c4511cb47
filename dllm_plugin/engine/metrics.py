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
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from dllm_plugin.config.carriers import EndedRequest, StepWidth, unpack_reports
from dllm_plugin.config.decode import get_decode_config
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


class WidthMetrics(NamedTuple):
    """Metrics of floating canvases, labelled as all vLLM metrics are."""

    width: Histogram
    changes: Counter
    p0: Gauge
    lam: Gauge
    scale: Gauge

    def observe(self, step: StepWidth, labels: list[object]) -> None:
        """Count a step."""
        self.width.labels(*labels).observe(step.width)
        self.changes.labels(*labels).inc(step.changes)
        self.p0.labels(*labels).set(step.p0)
        self.lam.labels(*labels).set(step.lam)
        if step.scale:
            self.scale.labels(*labels).set(step.scale)


@cache
def width_metrics(names: tuple[str, ...]) -> WidthMetrics:
    """Register the metrics once in a process; `names` are those of the labels."""
    return WidthMetrics(
        Histogram(
            "diffuplug:width",
            "Canvas positions of a step.",
            names,
            buckets=[float(width) for width in WIDTHS],
        ),
        Counter(
            "diffuplug:width_changes", "How often another width was chosen.", names
        ),
        _gauge(
            "acceptance_p0", "Share of first masks that are accepted, as fitted.", names
        ),
        _gauge(
            "acceptance_lambda", "How fast that falls with the rank of a mask.", names
        ),
        _gauge(
            "step_cost_scale", "Time of steps by what was measured at capture.", names
        ),
    )


def _gauge(name: str, documentation: str, names: tuple[str, ...]) -> Gauge:
    return Gauge(
        f"diffuplug:{name}", documentation, names, multiprocess_mode="mostrecent"
    )


class RequestHistograms(NamedTuple):
    """Histograms of what requests took, labelled also by why they ended."""

    forwards: Histogram
    tokens_per_forward: Histogram
    positions_per_token: Histogram

    def observe(self, request: EndedRequest, labels: list[object]) -> None:
        """Count a request; the ratios leave out requests without a forward."""
        labels = [*labels, str(FinishReason(request.reason))]
        forwards, tokens = request.forwards, request.tokens
        self.forwards.labels(*labels).observe(forwards)
        if forwards:
            self.tokens_per_forward.labels(*labels).observe(tokens / forwards)
            positions_per_token = request.positions / max(tokens, 1)
            self.positions_per_token.labels(*labels).observe(positions_per_token)

    def show(self, labels: list[object]) -> None:
        """Show zeros before the first request ends."""
        for histogram in self:
            for reason in FinishReason:
                histogram.labels(*labels, str(reason))


@cache
def request_histograms() -> RequestHistograms:
    """Register the histograms, once in a process."""
    return RequestHistograms(
        _powers_of_two("request_forwards", "Forwards of a request.", 0, 12),
        _powers_of_two("request_tokens_per_forward", "Its tokens per forward.", -3, 8),
        _powers_of_two(
            "request_positions_per_token", "Its computed positions per token.", 0, 14
        ),
    )


def _powers_of_two(name: str, documentation: str, low: int, high: int) -> Histogram:
    buckets = [2.0**power for power in range(low, high + 1)]
    labels = [*LABELS, "reason"]
    return Histogram(f"diffuplug:{name}", documentation, labels, buckets=buckets)


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
        self.enabled = (
            model_config is not None and model_config.architecture in ARCHITECTURES
        )
        self._prom: SpecDecodingProm | None = None
        self._of_requests: RequestHistograms | None = None
        self._of_widths: WidthMetrics | None = None
        self._floats = self.enabled and get_decode_config(vllm_config).method.floats
        self._log = StepLog()
        self._labels: dict[int, list[object]] = {}
        if self.enabled:
            for index in engine_indexes or [0]:
                self._labels[index] = [model_config.served_model_name, str(index)]

    def log_engine_initialized(self) -> None:
        """Register the counters, labelled as all other vLLM metrics are."""
        if not self.enabled or self._prom is not None:
            return
        self._prom = SpecDecodingProm(None, LABELS, self._labels, is_diffusion=True)
        self._of_requests = request_histograms()
        for of_engine in self._labels.values():
            self._of_requests.show(of_engine)
        if self._floats:
            self._of_widths = width_metrics(tuple(LABELS))

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
        assert self._of_requests is not None
        ended, widths = unpack_reports(stats)
        for request in ended:
            self._of_requests.observe(request, labels)
        if self._of_widths is not None:
            for step in widths:
                self._of_widths.observe(step, labels)

    def log(self) -> None:
        """Log requests and tokens since the last call, if there were any."""
        self._log.log()
