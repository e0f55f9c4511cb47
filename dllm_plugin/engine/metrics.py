"""Count denoising steps on /metrics: vLLM's own diffusion metrics, for our architectures.

vLLM exports them only where ``ModelConfig.is_diffusion`` holds, which our models must not set (its
front end would then refuse ordinary sampling parameters). The scheduler's numbers are the same, so
this stat-logger plugin (entry point group ``vllm.stat_logger_plugins``) hands them to vLLM's own
``SpecDecodingProm``. For every other model it does nothing.
"""

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

from dllm_plugin.models import ARCHITECTURES


class DenoisingMetrics(AggregateStatLoggerBase):
    """Log the denoising steps of all engines of a front end.

    The counters appear in :meth:`log_engine_initialized`, after every logger has been built: vLLM's
    Prometheus logger is built after the plugins and removes all ``vllm:`` metrics that it finds,
    those of an earlier engine in the process included, so later is also free of duplicates.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        model_config = vllm_config.model_config
        self.enabled = model_config is not None and model_config.architecture in ARCHITECTURES
        self._prom: SpecDecodingProm | None = None
        self._logging = SpecDecodingLogging(is_diffusion=True)
        self._labels: dict[int, list[object]] = {}
        if self.enabled:
            name = model_config.served_model_name
            self._labels = {index: [name, str(index)] for index in engine_indexes or [0]}

    def log_engine_initialized(self) -> None:
        """Register the counters, labelled as all other vLLM metrics are."""
        if self.enabled and self._prom is None:
            self._prom = SpecDecodingProm(
                None, ["model_name", "engine"], self._labels, is_diffusion=True
            )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Count one scheduler step of engine `engine_idx`."""
        if self._prom is None or scheduler_stats is None or engine_idx not in self._labels:
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is not None:
            self._prom.observe(stats, engine_idx)
            self._logging.observe(stats)

    def log(self) -> None:
        """Print committed tokens per denoising step since the last call, if there were any."""
        self._logging.log()
