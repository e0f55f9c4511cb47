"""Counts of choices whose prompt was cached: what is wasted does not depend on that."""

from typing import Any

from engines import EngineRoom, a_prompt, generate, params

from dllm_plugin.api.watched_engine import Counts, counts_of

PROMPT, LENGTH = 100, 24


def counts(output: Any) -> list[Counts | None]:
    return [
        counts_of(choice, len(choice.token_ids), PROMPT) for choice in output.outputs
    ]


def test_choices_of_one_prompt(overlapped: bool, room: EngineRoom) -> None:
    """The second choice finds the pages of the first; alone, each computes the prompt or not."""
    llm = room.start(
        "sdar", {}, async_scheduling=overlapped, enable_prefix_caching=True
    )
    hot = {"temperature": 0.9, "dllm_threshold": 0.3}
    [together] = generate(
        llm, [a_prompt(PROMPT, 1)], params(LENGTH, n=3, seed=5, **hot)
    )
    found = counts(together)
    assert (
        len(
            {
                choice.spec_decode_metrics.per_step_drafted[0]
                for choice in together.outputs
            }
        )
        > 1
    )
    for place, seed in enumerate((5, 6, 7)):
        llm.reset_prefix_cache()
        alone = [
            generate(llm, [a_prompt(PROMPT, 1)], params(LENGTH, seed=seed, **hot))[0]
            for _ in range(2)
        ]
        cold, warm = alone
        assert cold.num_cached_tokens == 0 < warm.num_cached_tokens
        assert counts(warm)[0].computed_positions < counts(cold)[0].computed_positions
        wasted = {
            one.wasted_positions for one in (found[place], *counts(cold), *counts(warm))
        }
        assert len(wasted) == 1 and min(wasted) > 0
