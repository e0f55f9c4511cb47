"""No step waits for the device or compiles: by vLLM's own check of waits, torch's and Triton's.

vLLM finds reading a value, `nonzero`, and copies from or to memory that is not pinned. That it
waits for the event of a finished copy, elsewhere and on purpose, is none of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

D2F = {"strategy": "d2f"}
DUAL = {"strategy": "dual_cache"}
SINGLE_BLOCKS = {"strategy": "block_diffusion", "commit_alone_from": 2}
DISTINCT = D2F | {"kv_cache_layout": "distinct"}


def watch(family, options):
    """Where an engine's steps waited, by kind; in a process, for vLLM reads at start what to do."""
    script = Path(__file__).with_name("watched_steps.py")
    watched = {"VLLM_GPU_SYNC_CHECK": "warn", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    watched["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    done = subprocess.run(
        [sys.executable, str(script), family, json.dumps(options)],
        env=os.environ | watched,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [place.startswith("compiled ") for place in found.pop("control")] == [
        False,
        True,
    ]
    return {kind: places for kind, places in found.items() if places}


@pytest.mark.parametrize(
    ("family", "dllm", "options"),
    [
        ("llada", D2F, {}),
        ("dream", SINGLE_BLOCKS, {}),
        ("llada", DUAL, {}),
        ("sdar", {}, {}),
        ("llada2.1", {}, {"but": ["held"]}),  # which it refuses
        ("dream", DISTINCT, {"attention_backend": None}),
        ("dream", D2F, {"attention_backend": "FLASH_ATTN", "dtype": "bfloat16"}),
        ("fast-dllm-v2", {}, {"but": ["held"]}),
    ],
    ids=[
        "d2f",
        "single-blocks",
        "dual-cache",
        "sdar",
        "llada2.1",
        "distinct",
        "flash",
        "fast",
    ],
)
def test_no_step_waits_or_compiles(family, dllm, options):
    assert watch(family, {"dllm": dllm, "async_scheduling": True} | options) == {}
