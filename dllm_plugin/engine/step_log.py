"""Log what a server does, in one line every few seconds while requests run."""

import logging
import time

from vllm.v1.metrics.stats import SchedulerStats

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
