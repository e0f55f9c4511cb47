"""Declare every ``dllm_*`` argument of a request.

An argument is one field of :class:`RequestArguments`. Its limits, its sentence in docs/options.md
and what else is known of it stand in the field's metadata; what excludes it stands in
:mod:`dllm_plugin.config.request.exclusions`. A number that the engine may have as an option
too is a field of :class:`dllm_plugin.config.options.Numbers`, which is inherited.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dllm_plugin.config.options import (
    FILL,
    MAX_POSITIONS,
    MAX_STEPS,
    OPTIONS,
    REQUEST_PREFIX,
    Numbers,
    Option,
    option,
)
from dllm_plugin.config.validation import (
    Check,
    Choice,
    Flag,
    Number,
    WholeNumber,
    WholeNumbers,
)

AUTO, DRAFTS, AUTOMATON = "auto", "drafts", "automaton"
GRAMMAR_MODES = (AUTO, DRAFTS, AUTOMATON)
# Of bad words: tokens of one, and words of several tokens times the tokens of the longest.
MAX_WORD_TOKENS, MAX_WORDS_TOKENS = 16, 1024


def end_of_gaps(token_ids: Sequence[int]) -> int:
    """Return where the last gap stops; 0 without a gap."""
    if FILL not in token_ids:
        return 0
    return len(token_ids) - token_ids[::-1].index(FILL)


@dataclass(frozen=True)
class Template:
    """Store the positions after a prompt: token ids, and `FILL` for a position to fill.

    A *gap* is a run of positions to fill, a *pin* a token that is given, the *tail* what is given
    after the last gap. The answer ends with the last gap; the tail is seen and never emitted.
    """

    token_ids: tuple[int, ...]
    ends_given: bool = False  # what is given after the last gap belongs to the answer

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Return where the gaps start and stop."""
        found, start = [], None
        for place, token in enumerate((*self.token_ids, 0)):
            if token == FILL and start is None:
                start = place
            elif token != FILL and start is not None:
                found.append((start, place))
                start = None
        return found

    @property
    def end(self) -> int:
        """Return where the answer stops, by default with the last gap; 0 without a gap."""
        if self.ends_given:
            return len(self.token_ids)
        return end_of_gaps(self.token_ids)

    @property
    def tail(self) -> int:
        """Return how many tokens are given after the last gap."""
        return len(self.token_ids) - self.end

    def given_blocks(self, block_length: int) -> list[int]:
        """Return the tokens of the leading blocks that are given as a whole."""
        first = self.gaps[0][0]
        return list(self.token_ids[: first - first % block_length])

    def ends(self, stop_token_ids: Iterable[int]) -> list[int]:
        """Return which of the tokens end the answer where they are decided.

        None do with several gaps, since what stands after the first is wanted, and none that are
        given before a single gap.
        """
        if len(self.gaps) > 1:
            return []
        before = self.token_ids[: self.gaps[0][0]]
        return [token for token in stop_token_ids if token not in before]


def argument(default: Any, check: Check, doc: str, **rest: Any) -> Any:
    """Declare an argument that only requests have; `rest` as for :func:`option`."""
    return option(default, check, doc, request=True, **rest)


def resolved(name: str, check: Check | None = None) -> Any:
    """Declare an argument that is an option too, if need be with another check than that."""
    known = OPTIONS[name]
    known = dataclasses.replace(known, check=check or known.check)
    return dataclasses.field(metadata={"option": known})


@dataclass(frozen=True, kw_only=True)
class RequestArguments(Numbers):
    """Store what a request decodes with and reports: its arguments, else the engine's defaults."""

    policy: str = resolved("policy")
    threshold: float = resolved("threshold", Number(0.0, 1.0))
    editing_threshold: float = resolved("editing_threshold", Number(0.0, 1.0))
    steps: int = resolved("steps")
    block_length: int = resolved("block_length", WholeNumber(1))
    window: int | None = resolved("window")
    max_active_blocks: int = resolved("max_active_blocks", WholeNumber(1))
    # 0: blocks have none.
    sub_block_length: int = resolved("sub_block_length", WholeNumber(1, MAX_STEPS))
    template: Template | None = argument(
        None,
        WholeNumbers("token ids, with -1 for a position to fill", -1),
        "Tokens of the answer and after it that are given; -1: a position to fill.",
        needs="full_attention",
    )
    add_eos_at_end: bool = argument(
        False,
        Flag(),
        "The reserved last position holds EOS instead of the pad token.",
        off=(False,),
        needs="reserves_last",
    )
    targets: tuple[int, ...] | None = argument(
        None,
        WholeNumbers("token ids", 0),
        "Tokens that the gaps of the template take, all in one forward.",
        needs="full_attention",
    )
    schedule: tuple[int, ...] | None = argument(
        None,
        WholeNumbers("widths", most=MAX_STEPS),
        "Positions that each forward computes, instead of a choice by load.",
        needs="floats",
    )
    max_thinking_tokens: int | None = argument(
        None,
        WholeNumber(0, MAX_POSITIONS, open=True),
        "Tokens of the answer after which thinking ends.",
        off=(None,),
        needs="causal_commit",
    )
    end_think_token_id: int | None = argument(
        None,
        WholeNumber(0, MAX_POSITIONS, open=True),
        "The token that ends thinking.",
        off=(None,),
        needs="causal_commit",
    )
    grammar: str = argument(
        AUTO,
        Choice(GRAMMAR_MODES),
        "How structured output is decoded: by checked drafts or by an automaton.",
    )
    statistics: int = argument(
        1, WholeNumber(0, 1), "1: the finished output carries `spec_decode_metrics`."
    )
    frames: int = argument(
        0,
        WholeNumber(0, MAX_STEPS),
        "Every so many forwards, report what is decided of the canvas; 0: never.",
    )
    early_text: int = argument(
        0,
        WholeNumber(0, 1),
        "1: send a leading run of decided tokens before its block commits.",
    )
    trace: int = argument(
        0, WholeNumber(0, 1), "1: report forward and confidence of each token."
    )

    @property
    def is_watched(self) -> bool:
        """Return whether steps of the request bring its canvas to the host."""
        return bool(self.frames or self.early_text or self.trace)

    @property
    def has_half_a_budget(self) -> bool:
        """Return whether only one of the two arguments of a thinking budget is given."""
        return (self.max_thinking_tokens is None) != (self.end_think_token_id is None)

    @property
    def withholds(self) -> bool:
        """Return whether positions may stay masked that the policy takes."""
        return any(getattr(self, name) != off for name, off in WITHHOLDING.items())


ARGUMENTS: dict[str, Option] = {
    f.name: f.metadata["option"] for f in dataclasses.fields(RequestArguments)
}
WITHHOLDING: dict[str, Any] = {
    f.name: f.default
    for f in dataclasses.fields(RequestArguments)
    if f.metadata["option"].withholds
}
TEMPLATE = REQUEST_PREFIX + "template"
TARGETS = REQUEST_PREFIX + "targets"
END_THINK = REQUEST_PREFIX + "end_think_token_id"
GRAMMAR = REQUEST_PREFIX + "grammar"
STATISTICS = REQUEST_PREFIX + "statistics"
FRAMES = REQUEST_PREFIX + "frames"
EARLY_TEXT = REQUEST_PREFIX + "early_text"
TRACE = REQUEST_PREFIX + "trace"


def refuse_names(
    given: Mapping[str, Any], unread: Iterable[str], strategy: str, architecture: str
) -> None:
    """Raise ValueError naming the first option that a strategy does not read."""
    for name in unread:
        if name in given and given[name] not in ARGUMENTS[name].off:
            raise ValueError(
                f"{name} has no effect with strategy {strategy!r} on {architecture}: "
                "remove it or choose another strategy."
            )
