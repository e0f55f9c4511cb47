"""Count positions and forwards of each step of an engine while it serves requests.

Both come with the message that a step sends anyway, so that counting takes nothing from what is
timed. Positions are those of vLLM's ``cudagraph_metrics``, which an engine has to be started with;
forwards those of its statistics of speculative decoding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Count(NamedTuple):
    """Count what a step computed; zeros if it computed nothing.

    positions  of all requests, without padding; 0 if the engine does not count them
    forwards   whose results count: without forwards launched for a block that was done
    """

    positions: int = 0
    forwards: int = 0


class Counter:
    """Take part in an engine's logging, as one of vLLM's ``StatLoggerBase``."""

    def __init__(self) -> None:
        self.count = Count()

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Read the message of a step."""
        graphs = scheduler_stats.cudagraph_stats
        forwards = scheduler_stats.spec_decoding_stats
        self.count = Count(
            graphs.num_unpadded_tokens if graphs else 0,
            forwards.num_drafts if forwards else 0,
        )

    def log(self) -> None:
        """Print nothing: vLLM asks for this once in a while."""

    def take(self) -> Count:
        """Return the last message's counts and reset them: the next message may have none."""
        count, self.count = self.count, Count()
        return count


@contextmanager
def counting(engine: Any) -> Iterator[Callable[[], Count]]:
    """Count the steps of an engine; yield a function that returns the last message's count."""
    counter, loggers = Counter(), engine.logger_manager.stat_loggers
    loggers.append(counter)
    try:
        yield counter.take
    finally:
        loggers.remove(counter)
