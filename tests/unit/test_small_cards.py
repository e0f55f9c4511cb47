"""Test what an engine reserves on GPUs of little memory."""

import pytest

from dllm_plugin.config.memory import CHUNK_ROWS, chunk_rows
from dllm_plugin.config.scheduling import most_requests

GIB = 1 << 30
LLADA = 126464  # columns


@pytest.mark.parametrize(
    ("device", "columns", "rows"),
    [
        (80 * GIB, LLADA, 256),
        (24 * GIB, LLADA, 192),
        (12 * GIB, LLADA, 96),
        (int(7.75 * GIB), LLADA, 64),
        (int(7.75 * GIB), 32000, 256),
        (GIB, LLADA, 32),
    ],
)
def test_copies_of_rows_take_a_share_of_the_device(
    device: int, columns: int, rows: int
) -> None:
    assert chunk_rows(CHUNK_ROWS, columns, device) == rows
    if rows > 32:
        assert 8 * rows * columns * 4 < 0.035 * device


@pytest.mark.parametrize(
    ("chosen", "device", "most"),
    [
        (256, 80 * GIB, 256),
        (256, 16 * GIB - 400 * 2**20, 256),
        (256, 12 * GIB, 16),
        (1024, 8 * GIB, 16),
        (512, 8 * GIB, 16),
        (8, 8 * GIB, 8),
        (40, 8 * GIB, 40),
    ],
)
def test_a_small_gpu_serves_few_requests_unless_asked(
    chosen: int, device: int, most: int
) -> None:
    assert most_requests(chosen, {256, 1024}, device) == most
