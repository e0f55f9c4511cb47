"""The line that a server logs every few seconds while requests run."""

import logging

import pytest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dllm_plugin.engine import metrics as step_log


def step(requests: int, tokens: int, waiting: int = 0) -> SchedulerStats:
    """A scheduler step of so many requests, each of which makes a forward."""
    steps = SpecDecodingStats.new(1)
    steps.num_drafts, steps.num_accepted_tokens = requests, tokens
    return SchedulerStats(
        num_running_reqs=requests, num_waiting_reqs=waiting, spec_decoding_stats=steps
    )


def test_a_line_counts_since_the_last_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "diffuplug")
    log = step_log.StepLog()
    for stats in (step(2, 6), step(2, 2, waiting=1), SchedulerStats()):
        log.observe(stats)
    now += 4.0
    log.log()
    log.observe(step(1, 5))
    now += 10.0
    log.log()
    assert caplog.messages == [
        "up to 3 requests at once, 2.0 tokens/s, 2.00 tokens per forward",
        "up to 1 requests at once, 0.5 tokens/s, 5.00 tokens per forward",
    ]


def test_no_line_without_a_forward(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diffuplug")
    step_log.StepLog().log()
    assert caplog.messages == []
