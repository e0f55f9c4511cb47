"""Weights that sleep took: the same tokens after waking, of every family."""

import pytest
import recorded
from engines import generate, letters, params, token_ids
from test_weight_updates import DECODING


def tokens(llm):
    prompts = [letters(12, seed) for seed in range(3)]
    # Log-probabilities read tensors of constants, which sleep takes too.
    wishes = params(20, logprobs=1)
    return [token_ids(output) for output in generate(llm, prompts, wishes)]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", DECODING)
def test_asleep_and_awake(name, eager):
    """Level 1 keeps the weights on the host; level 2 drops them, and they are loaded again."""
    options = {"enable_sleep_mode": True, "enforce_eager": eager, "max_model_len": 256}
    llm = recorded.start(f"checkpoints/tiny-{name}", DECODING[name], **options)
    before = tokens(llm)
    llm.sleep(level=1)
    llm.wake_up()
    after = tokens(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    again = tokens(llm)
    llm.llm_engine.engine_core.shutdown()
    assert after == before == again
