"""Text with gaps becomes a prompt and a template, and tokens become the text of gaps again."""

from types import SimpleNamespace
from typing import Any

import pytest

from dllm_plugin.config.options import FILL
from dllm_plugin.infilling.gaps import (
    beginning,
    cut,
    filled,
    parts_of,
    parts_of_text,
    place,
    together,
)

END = 3


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def with_start(text: str) -> list[int]:
    return [1, *encode(text)]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"text": "a [MASK:3] b"}, ["a ", (3,), " b"]),
        ({"text": "[MASK:3][MASK:2]ä[MASK:1]"}, [(5,), "ä", (1,)]),
        ({"text": "[MASK] [mask:2] [MASK:2]"}, ["[MASK] [mask:2] ", (2,)]),
        ({"parts": ["[MASK:3]", {"mask": 3}, "a", "b"]}, ["[MASK:3]", (3,), "ab"]),
        ({"text": "a [MASK:8,2,8] b[MASK:auto]"}, ["a ", (2, 8), " b", ()]),
        (
            {"parts": [{"mask": [4, 2]}, "", {"mask": 3}, "a", {"mask": [5]}]},
            [(5, 7), "a", (5,)],
        ),
        ({"parts": ["a", {"mask": "auto"}]}, ["a", ()]),
        ({"draft": "the old one", "rewrite": [[4, 7]]}, ["the ", (3,), " one"]),
        (
            {"draft": "abcdef", "rewrite": [[0, 1], [4, 6]], "slack": 2},
            [(3,), "bcd", (4,)],
        ),
    ],
    ids=str,
)
def test_parts(body: dict[str, Any], parts: list[Any]) -> None:
    assert parts_of(body, encode) == parts


def test_there_and_back() -> None:
    """A gap's text ends at its first end token; what is given comes back as it was."""
    gapped = place(parts_of_text("ab[MASK:3]cd[MASK:2]e"), None, with_start, encode)
    assert gapped.prompt == [1, *encode("ab")]
    assert gapped.template == [FILL] * 3 + encode("cd") + [FILL] * 2 + encode("e")
    assert (gapped.end, gapped.num_gaps) == (7, 2)
    gaps = filled(gapped, [*encode("x"), END, *encode("zcdvw")], {END}, decode)
    assert [(gap.text, gap.first, len(gap.tokens)) for gap in gaps] == [
        ("x", 0, 1),
        ("vw", 5, 2),
    ]
    assert together(gapped, gaps) == "abxcdvwe"
    stopped = [cut(gaps[1], "w", keeps).text for keeps in (False, True)]
    assert stopped == ["v", "vw"] and cut(gaps[1], "q", False) == gaps[1]
    behind_messages = place([(2,), "e"], [7, 8], with_start, encode)
    assert (behind_messages.prompt, behind_messages.end) == ([7, 8], 2)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "infill needs one of text, parts, draft, got 0 of them."),
        ({"text": "a", "slack": 2}, "slack has no effect without draft: leave it out."),
        ({"text": 5}, "text must be text with [MASK:n], got 5."),
        ({"text": "abc"}, "text has no gap: nothing is to be filled; write [MASK:4]"),
        (
            {"text": "[MASK:2] [MASK:x]"},
            "'[MASK:x]' names no lengths of 1 position or more: w",
        ),
        (
            {"text": "a [MASK:-2]"},
            "'[MASK:-2]' names no lengths of 1 position or more: wr",
        ),
        (
            {"text": "[MASK:3,]"},
            "'[MASK:3,]' names no lengths of 1 position or more: wri",
        ),
        ({"text": "a [mask:2] b"}, "write [MASK:4], [MASK:2,4] for one of two"),
        ({"parts": ["abc"]}, "parts has no gap: nothing is to be filled."),
        ({"text": "[MASK:0]"}, "'[MASK:0]' names no lengths of 1 position or more: wr"),
        ({"parts": "abc"}, "parts must be a list of texts and"),
        (
            {"parts": [{"mask": True}]},
            "A gap must have at least 1 position, a whole number, got True.",
        ),
        ({"parts": [{"mask": []}]}, "A gap must have 1 to 16 lengths, got 0."),
        ({"parts": [{"mask": [1] * 17}]}, "A gap must have 1 to 16 lengths, got 17."),
        (
            {"parts": [{"mask": [4, 0]}]},
            "A gap must have at least 1 position, a whole number, got 0.",
        ),
        (
            {"parts": [{"mask": "automatic"}]},
            "at least 1 position, a whole number, got 'automatic'.",
        ),
        (
            {"text": "[MASK:auto][MASK:2]"},
            "A gap of length auto needs text between it and",
        ),
        (
            {"text": "[MASK:1,3][MASK:10,20,30,40,50,60,70,80,90]"},
            "gaps make 18 combinations",
        ),
        (
            {"text": "[MASK:1,20,300]" * 5},
            "The lengths of the gaps make 21 combinations, at most",
        ),
        ({"parts": [{"mask": 1, "x": 2}]}, "parts must be texts and"),
        (
            {"draft": "abc", "rewrite": [[1, 1]]},
            "within the 3 characters of draft, got [1, 1].",
        ),
        ({"draft": "abc", "rewrite": [[1, 3], [0, 1]]}, "got [0, 1]."),
        ({"draft": "abc"}, "rewrite must be a list of [start, stop]"),
        ({"draft": "abc", "rewrite": [], "slack": -1}, "slack must be a whole number"),
        ({"draft": 5, "rewrite": []}, "draft must be text, got 5."),
    ],
    ids=str,
)
def test_refused(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parts_of(body, encode)
    assert sentence in str(caught.value)


def test_nothing_before_the_first_gap() -> None:
    """The prompt is what `first` makes of an empty text."""
    gapped = place(parts_of_text("[MASK:3] b"), None, lambda text: [7], encode)
    assert gapped.prompt == [7] and gapped.template[:3] == [FILL] * 3
    assert beginning(SimpleNamespace(bos_token_id=None, eos_token_id=4)) == [4]
    with pytest.raises(ValueError, match="no token that begins texts"):
        beginning(SimpleNamespace(bos_token_id=None, eos_token_id=None))
