"""What the benchmark says that a step allocates holds the logits, and not what the engine keeps."""

from dummies import without_checkpoint

from diffuplug_bench.request_loop import Ask
from diffuplug_bench.step.memory import logits_bytes, temporary_bytes
from dllm_plugin.commands.offline import BUNDLED_MEMORY, stop_engine

REQUESTS, CANVAS = 1, 32


def test_a_step_allocates_its_logits_and_no_cache(tmp_path):
    engine = without_checkpoint("ours", tmp_path)
    schedule = {"dllm_policy": "low_confidence", "dllm_steps": 8}
    sampling = {"max_tokens": 64, "ignore_eos": True, "extra_args": schedule}
    asks = [Ask([1 + i for i in range(160)], sampling)] * REQUESTS
    found = temporary_bytes(engine, asks)
    logits = logits_bytes(engine, REQUESTS * CANVAS, vocab_parallel=False)
    stop_engine(engine)
    assert logits == REQUESTS * CANVAS * 512 * 2
    assert logits <= found < BUNDLED_MEMORY["kv_cache_memory_bytes"] / 100
