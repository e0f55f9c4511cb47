"""Count what a request took: forwards, tokens, positions, by choice and together."""

from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput

from dllm_plugin.config.carriers import (
    unpack_positions,
    unpack_start,
    unpack_widths,
)
from dllm_plugin.config.request.arguments import GRAMMAR_MODES


class Counts(NamedTuple):
    """Store the cost of one choice.

    forwards            denoising steps, those that only commit included
    tokens              completion tokens
    computed_positions  queries of all forwards: prompt, refreshes and guidance included
    wasted_positions    those beyond one for each token of answer and uncached prompt
    grammar             how it kept to its grammar; None without a grammar
    """

    forwards: int
    tokens: int
    computed_positions: int
    wasted_positions: int
    grammar: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and tokens per forward."""
        per_forward = round(self.tokens / self.forwards, 2) if self.forwards else 0.0
        fields = {
            "forwards": self.forwards,
            "tokens": self.tokens,
            "tokens_per_forward": per_forward,
            "computed_positions": self.computed_positions,
            "wasted_positions": self.wasted_positions,
        }
        return fields if self.grammar is None else fields | {"grammar": self.grammar}


def counts_of(
    completion: CompletionOutput,
    tokens: int,
    prompt_tokens: int,
    cached: int | None = None,
) -> Counts | None:
    """Return the counts of a choice that ended; None if the scheduler sent none.

    Args:
        tokens: completion tokens of the choice.
        prompt_tokens: of the prompt, cached ones included.
        cached: cached prompt tokens as vLLM reports them. Read only if canvases float;
            None: estimated from the positions that belong to no forward.
    """
    sent = completion.spec_decode_metrics
    if sent is None:  # aborted before the engine answered
        return None
    computed, mode = unpack_positions(sent), None
    widths = unpack_widths(sent)
    if widths is None:
        cached, mode = unpack_start(sent)
    elif cached is None:
        cached = max(0, prompt_tokens - (computed - sum(widths)))
    wasted = computed - (prompt_tokens - cached) - tokens
    grammar = None if mode is None else GRAMMAR_MODES[mode]
    return Counts(sum(sent.histogram), tokens, computed, max(wasted, 0), grammar)


def total(of_choices: list[Counts]) -> Counts:
    """Return the sum over the choices of a request, which has one grammar at most."""
    forwards, tokens, computed, wasted, _ = zip(*of_choices, strict=True)
    return Counts(
        sum(forwards), sum(tokens), sum(computed), sum(wasted), of_choices[0].grammar
    )
