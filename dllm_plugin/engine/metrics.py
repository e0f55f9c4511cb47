"""Count denoising steps on /metrics: vLLM's own diffusion metrics, for our architectures.

vLLM exports them only where ``ModelConfig.is_diffusion`` holds, which our models must not set (its
front end would then refuse ordinary sampling parameters). The scheduler's numbers are the same, so
this stat-logger plugin (entry point group ``vllm.stat_logger_plugins``) hands them to vLLM's own
``SpecDecodingProm``. Three histograms of ours say what each request took. For every other model it
does nothing.

Show on /metrics which widths steps of floating canvases have, and by what they are chosen.
"""

from functools import cache
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

from dllm_plugin.config.decode import get_decode_config
from dllm_plugin.decoding.widths import WIDTHS
from dllm_plugin.models import ARCHITECTURES

# In the place of a request's forwards: what the next two integers are.
WIDTH, FITTED, SCALE = -1, -2, -3
MILLI = 1000


class WidthMetrics(NamedTuple):
    """Hold the metrics, labelled as all vLLM metrics are."""

    width: Histogram
    changes: Counter
    p0: Gauge
    lam: Gauge
    scale: Gauge

    def observe(self, numbers: list[int], labels: list[object]) -> None:
        """Take what :func:`told` made of a step."""
        for i in range(0, len(numbers), 3):
            kind, first, second = numbers[i : i + 3]
            if kind == WIDTH:
                self.width.labels(*labels).observe(first)
                self.changes.labels(*labels).inc(second)
            elif kind == FITTED:
                self.p0.labels(*labels).set(first / MILLI)
                self.lam.labels(*labels).set(second / MILLI)
            elif kind == SCALE:
                self.scale.labels(*labels).set(first / MILLI)


def told(
    width: int, changes: int, fitted: tuple[float, float], scale: float | None = None
) -> list[int]:
    """Return what is told of a step, as integers.

    Its width, how often that has changed, the fitted acceptance and, where steps were measured, how
    their times compare with that.
    """
    p0, lam = fitted
    numbers = [WIDTH, width, changes, FITTED, round(MILLI * p0), round(MILLI * lam)]
    return numbers if scale is None else [*numbers, SCALE, round(MILLI * scale), 0]


@cache
def width_metrics(names: tuple[str, ...]) -> WidthMetrics:
    """Register the metrics, once in a process; `names` are those of the labels."""
    widths = [float(width) for width in WIDTHS]
    return WidthMetrics(
        Histogram(
            "diffuplug:width", "Canvas positions of a step.", names, buckets=widths
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


LABELS = ["model_name", "engine"]


class RequestHistograms(NamedTuple):
    """Hold the histograms of what requests took, labelled as all vLLM metrics are."""

    forwards: Histogram
    tokens_per_forward: Histogram
    positions_per_token: Histogram

    def observe(self, ended: list[int], labels: list[object]) -> None:
        """Count requests: forwards, tokens and positions of each."""
        for i in range(0, len(ended), 3):
            forwards, tokens, positions = ended[i : i + 3]
            if forwards < 0:  # not a request: see `WidthMetrics`
                continue
            self.forwards.labels(*labels).observe(forwards)
            self.tokens_per_forward.labels(*labels).observe(tokens / forwards)
            self.positions_per_token.labels(*labels).observe(positions / max(tokens, 1))


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
    return Histogram(f"diffuplug:{name}", documentation, LABELS, buckets=buckets)


class DenoisingMetrics(AggregateStatLoggerBase):
    """Log the denoising steps of all engines of a front end.

    The counters appear in :meth:`log_engine_initialized`, after every logger has been built: vLLM's
    Prometheus logger is built after the plugins and removes all ``vllm:`` metrics that it finds,
    those of an earlier engine in the process included, so later is also free of duplicates.
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
        self._logging = SpecDecodingLogging(is_diffusion=True)
        self._labels: dict[int, list[object]] = {}
        if self.enabled:
            name = model_config.served_model_name
            self._labels = {
                index: [name, str(index)] for index in engine_indexes or [0]
            }

    def log_engine_initialized(self) -> None:
        """Register the counters, labelled as all other vLLM metrics are."""
        if self.enabled and self._prom is None:
            self._prom = SpecDecodingProm(None, LABELS, self._labels, is_diffusion=True)
            self._of_requests = request_histograms()
            for labels in self._labels.values():
                for histogram in self._of_requests:
                    histogram.labels(*labels)  # shown before the first request ends
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
        if (
            self._prom is None
            or scheduler_stats is None
            or engine_idx not in self._labels
        ):
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._prom.observe(stats, engine_idx)
            self._logging.observe(stats)
            told, labels = stats.num_draft_tokens_per_pos, self._labels[engine_idx]
            if told and self._of_requests is not None:
                self._of_requests.observe(told, labels)
                if self._of_widths is not None:
                    self._of_widths.observe(told, labels)

    def log(self) -> None:
        """Print committed tokens per denoising step since the last call, if there were any."""
        self._logging.log()
