"""No step waits for the device: torch reports every operation that does, and none is reported.

Steps of running requests, and of one that arrives among them with its prompt. Reported are torch's
own operations: reading a value, `nonzero`, copies from pageable memory. That vLLM waits for the
event of a finished copy, elsewhere and on purpose, is none of them.
"""

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import recorded
from engines import a_prompt, params

D2F = {"strategy": "d2f"}
BLOCKS = {"strategy": "block_diffusion"}
ALONE = BLOCKS | {"commit_alone_from": 2}
SLOW = {"dllm_threshold": 1.0}  # one token per pass: requests run on while steps are watched
WISHES = {
    "plain": [SLOW, SLOW | {"temperature": 0.7, "seed": 3}, SLOW | {"temperature": 1.0}],
    "filtered": [
        SLOW | {"temperature": 0.8, "top_p": 0.9},
        SLOW | {"temperature": 0.8, "top_k": 5},
    ],
    "ruled": [
        SLOW | {"logit_bias": {70: 3.0}},
        SLOW | {"allowed_token_ids": list(range(64, 90))},
        SLOW | {"min_tokens": 20, "stop_token_ids": [7], "ignore_eos": False},
        {"dllm_policy": "entropy"},
    ],
    "kept": [SLOW | {"logprobs": 2}, SLOW | {"bad_words": ["ab", "c"]}],
}
TOKENS, BEFORE, STEPS = 200, 12, 20


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """To watch the steps. An engine makes vLLM remember this choice, which later tests need not."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    from vllm import envs

    envs.disable_envs_cache()


@contextmanager
def waits():
    """Where torch waited for the device: file and line of the Python code, filled at the end."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")


def test_a_wait_is_seen():
    with waits() as found:
        torch.ones(1, device="cuda").item()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("family", "dllm", "options"),
    [
        ("llada", D2F, {}),
        ("dream", D2F, {}),
        ("dream", ALONE, {}),
        ("sdar", {}, {}),
        ("llada2.1", {}, {}),
        ("llada", D2F | {"kv_cache_layout": "distinct"}, {"attention_backend": None}),
    ],
    ids=["llada", "dream", "dream-alone", "sdar", "llada2.1", "distinct"],
)
def test_no_step_waits(family, dllm, options):
    llm = recorded.start(f"checkpoints/tiny-{family}", dllm, async_scheduling=True, **options)
    engine, seen = llm.llm_engine, {}
    try:
        for kind, wishes in WISHES.items():
            for i, wish in enumerate(wishes):
                prompt = {"prompt_token_ids": a_prompt(20 + 9 * i, i)}
                engine.add_request(f"{kind}-{i}", prompt, params(TOKENS, **wish))
            for _ in range(BEFORE):
                engine.step()
            with waits() as seen[kind]:
                for _ in range(STEPS):
                    engine.step()
                late = {"prompt_token_ids": a_prompt(33, 9)}
                engine.add_request(f"{kind}-late", late, params(TOKENS, **wishes[0]))
                for _ in range(STEPS):
                    engine.step()
            assert engine.get_num_unfinished_requests() > 1, kind
            while engine.has_unfinished_requests():
                engine.step()
    finally:
        engine.engine_core.shutdown()
    assert {kind: sorted(set(places)) for kind, places in seen.items() if places} == {}
