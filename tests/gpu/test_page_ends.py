"""A conversation whose turns end where pages end: fp32, Triton attention, full CUDA graphs, async.

The block that ends a turn was never computed without masks, so its page must not be found again.
"""

import pytest
import recorded
from engines import a_prompt, params, token_ids

PAGE, TURNS = 32, 6
DLLM = {"block_length": 16, "canvas_length": 32}


def hits(engine):
    [counter] = [m for m in engine.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    return int(counter.value)


def answer(engine, prompt, steps, salt=None):
    """An answer to the end of a page; a salt of its own hides all that is cached."""
    inputs = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    wish = params(-len(prompt) % PAGE, dllm_policy="low_confidence", dllm_steps=steps)
    [output] = engine.generate([inputs], wish, use_tqdm=False)
    return token_ids(output)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", ["sdar", "llada2.0"])
def test_turns_end_where_pages_end(model, eager):
    engine = recorded.start(
        f"checkpoints/tiny-{model}",
        DLLM,
        block_size=PAGE,
        enable_prefix_caching=True,
        disable_log_stats=False,
        enforce_eager=eager,
    )
    found = []
    try:
        for steps in (
            1,
            3,
            16,
        ):  # whole blocks at once, whose keys are those of masks, or slowly
            text = a_prompt(37, steps)
            for turn in range(TURNS):
                before = hits(engine)
                said = answer(engine, text, steps)
                found.append(
                    (hits(engine) - before, max(0, len(text) - 9 - PAGE) * (turn > 0))
                )
                assert said == answer(engine, text, steps, f"{steps} {turn}"), (
                    steps,
                    turn,
                )
                text = text + said + a_prompt(9, 10 + turn)
    finally:
        engine.llm_engine.engine_core.shutdown()
    assert [got for got, _ in found] == [wanted for _, wanted in found]
