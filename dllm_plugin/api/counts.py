"""Say what a request took: forwards, tokens, positions, for each choice and together."""

from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput

from dllm_plugin.config.request.grammar_mode import WAYS


class Counts(NamedTuple):
    """Hold what one choice took.

    forwards            denoising steps, those that only commit included
    tokens              completion tokens
    computed_positions  queries of all forwards: prompt, refreshes and guidance included
    wasted_positions    those beyond one for each token of answer and uncached prompt
    grammar             how it kept to its grammar; None without one
    """

    forwards: int
    tokens: int
    computed_positions: int
    wasted_positions: int
    grammar: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and tokens per forward."""
        per_forward = round(self.tokens / self.forwards, 2) if self.forwards else 0.0
        fields = self._asdict()
        ordered = {
            "forwards": fields.pop("forwards"),
            "tokens": fields.pop("tokens"),
            "tokens_per_forward": per_forward,
            **fields,
        }
        return {name: value for name, value in ordered.items() if value is not None}


def counts_of(
    completion: CompletionOutput,
    tokens: int,
    prompt_tokens: int,
    cached: int | None = None,
) -> Counts | None:
    """Return the counts of a choice that ended, of the numbers that the scheduler sent with it.

    Args:
        tokens: completion tokens of the choice.
        prompt_tokens: of the prompt, cached ones included.
        cached: how many of these were cached, if vLLM says so of this choice. It is read where
            canvases float; None: estimated from the positions that belong to no forward.
    """
    sent = completion.spec_decode_metrics
    if sent is None:  # aborted before the engine answered
        return None
    computed, way = sent.num_draft_tokens, list[int]()
    if not sent.per_step_accepted:
        cached, *way = sent.per_step_drafted or [0]
    elif cached is None:
        # Where canvases float the list has the widths of the forwards, and no grammar.
        cached = max(0, prompt_tokens - (computed - sum(sent.per_step_drafted)))
    wasted = computed - (prompt_tokens - cached) - tokens
    grammar = WAYS[way[0]] if way else None
    return Counts(sum(sent.histogram), tokens, computed, max(wasted, 0), grammar)


def total(of_choices: list[Counts]) -> Counts:
    """Return the sum over the choices of a request, which has one grammar at most."""
    forwards, tokens, computed, wasted, _ = zip(*of_choices, strict=True)
    return Counts(
        sum(forwards), sum(tokens), sum(computed), sum(wasted), of_choices[0].grammar
    )
