"""Which lengths of a gap are tried, and what a score is made of."""

from typing import Any

import pytest
from test_gaps import END, decode, encode, with_start

from dllm_plugin.config.options import FILL
from dllm_plugin.infilling.gaps import filled, parts_of_text
from dllm_plugin.infilling.lengths import (
    best_of,
    canvas_positions,
    each_choice,
    lengths_of,
    place_each,
    score_of,
    scoring_of,
    told,
)


@pytest.mark.parametrize(
    ("asked", "most", "fewest", "lengths"),
    [
        (7, 12, 1, [7]),
        ([8, 2, 8], 12, 1, [2, 8]),
        ("auto", 40, 1, [4, 8, 16, 32, 40]),
        ("auto", 16, 5, [8, 16]),
        ("auto", 3, 1, [3]),
        ("auto", 1000, 1, [4, 8, 16, 32, 64]),
    ],
    ids=str,
)
def test_before_a_suffix(
    asked: Any, most: int, fewest: int, lengths: list[int]
) -> None:
    """`max_tokens` is tried too, and what a canvas cannot hold is not."""
    assert lengths_of(asked, most, fewest, room=100) == lengths


@pytest.mark.parametrize(
    "asked", [0, 33, [64], [], [4, "8"], True, "long", [1] * 17, {}], ids=str
)
def test_refused(asked: Any) -> None:
    with pytest.raises(ValueError) as caught:
        lengths_of(asked, 32, 1, 100)
    expected = 'lengths must be an integer, "auto" or at most 16 integers from 1 to max_tokens 32'
    assert str(caught.value).startswith(f"{expected}, got ")


@pytest.mark.parametrize("asked", ["auto", 4])
@pytest.mark.parametrize("most", [0, -5])
def test_no_position(asked: Any, most: int) -> None:
    with pytest.raises(ValueError) as caught:
        lengths_of(asked, most, 1, 100)
    assert str(caught.value) == f"suffix needs max_tokens of at least 1, got {most}."


def test_none_fits() -> None:
    """The shortest is left, so that the refusal states the least that it takes."""
    assert lengths_of("auto", 300, 1, room=-5) == [1]
    assert lengths_of("auto", 300, 7, room=2) == [7]


def test_fewer_positions_than_auto_tries() -> None:
    assert lengths_of("auto", 300, 1, room=3) == [3]
    assert lengths_of("auto", 2, 1, room=3) == [2]
    assert each_choice(["a", ()], 2) == [["a", (2,)]]


def test_each_choice() -> None:
    assert each_choice(["a", (2, 4), "b", (1, 3)], 99) == [
        ["a", (2,), "b", (1,)],
        ["a", (2,), "b", (3,)],
        ["a", (4,), "b", (1,)],
        ["a", (4,), "b", (3,)],
    ]
    assert [one[1][0] for one in each_choice(["a", (), "b", (10,)], 30)] == [4, 8, 16]
    assert each_choice(["a", ()], -2) == [["a", (1,)]], (
        "what does not fit is refused later"
    )
    with pytest.raises(ValueError) as caught:
        each_choice(["a", (), "b", ()], 300)
    assert str(caught.value) == (
        "The lengths of the gaps make 36 combinations, at most 16 are tried: name fewer."
    )
    with pytest.raises(ValueError, match="make over a billion combinations"):
        each_choice(["a", *[(1, 2), "b"] * 20000], 300)


def test_what_does_not_fit_is_left_out() -> None:
    """Of `auto` only: lengths that somebody names are refused if they do not fit."""
    two = [[one[1][0], one[3][0]] for one in each_choice(["a", (), "b", ()], 20)]
    assert two == [[4, 4], [4, 8], [4, 16], [8, 4], [8, 8], [16, 4]]
    named = [[one[1][0], one[3][0]] for one in each_choice(["a", (2, 12), "b", ()], 20)]
    assert named == [[2, 4], [2, 8], [12, 4], [12, 8]]
    assert [one[1][0] for one in each_choice(["a", (2, 40)], 20)] == [2, 40]
    assert each_choice(["a", (), "b", (), "c"], 7) == [["a", (3,), "b", (3,), "c"]]
    assert each_choice(["a", (), "b", (), "c"], 1) == [["a", (1,), "b", (1,), "c"]], (
        "refused later"
    )


def test_lengths_of_at_least_min_tokens() -> None:
    """The answer ends with the last gap, and what is given between gaps is in it."""
    parts = parts_of_text("ab[MASK:auto]cde")
    for fewest, lengths in ((4, [4, 8, 16]), (5, [8, 16]), (99, [16])):
        places = place_each(parts, None, with_start, encode, 20, 99, fewest)
        assert [one.parts[1][0] for one in places] == lengths
    named = place_each(
        parts_of_text("ab[MASK:2,4]"), None, with_start, encode, 20, 99, 3
    )
    assert [one.parts[1][0] for one in named] == [2, 4], (
        "vLLM refuses the shorter by name"
    )
    two = place_each(
        parts_of_text("a[MASK:auto]bc[MASK:3]"), None, with_start, encode, 20, 99, 10
    )
    assert [one.parts[1][0] for one in two] == [8]


def test_lengths_that_fit() -> None:
    """Of `auto` what a canvas holds beside the text, and the context behind the prompt."""
    for canvas, context, lengths in ((20, 99, [4, 8, 16]), (99, 20, [4, 8])):
        places = place_each(
            parts_of_text("ab[MASK:auto]cde"), None, with_start, encode, canvas, context
        )
        assert [one.parts[1][0] for one in places] == lengths


def test_a_suffix_longer_than_the_canvas() -> None:
    """It needs only the context, and positions of the canvas to score its first tokens."""
    text = "ab[MASK:auto]" + "c" * 40
    parts = parts_of_text(text)
    for context, lengths in ((99, [4, 8, 16]), (53, [4, 8])):
        choices = place_each(parts, None, with_start, encode, 20, context)
        assert [one.parts[1][0] for one in choices] == lengths
        assert canvas_positions(choices) == lengths[-1] + 4
    [alone] = place_each(
        parts_of_text(text.replace("auto", "20")), None, with_start, encode, 20, 99
    )
    assert canvas_positions([alone]) == 20


def test_a_score() -> None:
    """The tail's first four tokens behind the fills, and the fills up to their end tokens."""
    text = "ab[MASK:2,3]cd[MASK:2]efghi"
    choices = place_each(parts_of_text(text), None, with_start, encode, 99, 99)
    assert [choice.parts[1][0] for choice in choices] == [2, 3]
    gaps = filled(
        choices[1],
        [*encode("x"), END, *encode("zcd"), END, *encode("w")],
        {END},
        decode,
    )
    scoring = scoring_of(choices[1], gaps)
    assert scoring.text == encode("xcdefghi")
    assert scoring.template == [*encode("xcd"), FILL, FILL, FILL, FILL, *encode("i")]
    assert scoring.targets == encode("efgh")
    score = score_of(gaps, [-1.0, -9.0, -9.0, 0.0, 0.0, -3.0, -9.0], [-2.0, -4.0])
    assert score == pytest.approx(-2.0 - 3.0), "of an empty gap its end token"
    [alone] = place_each(parts_of_text("ab[MASK:2]"), None, with_start, encode, 99, 99)
    gaps = filled(alone, encode("xy"), {END}, decode)
    assert scoring_of(alone, gaps).places == ()
    assert score_of(gaps, [-1.0, -2.0], []) == -1.5
    assert told(choices, [-1.0, -2.0]) == [
        {"length": [2, 2], "score": -1.0},
        {"length": [3, 2], "score": -2.0},
    ]
    assert best_of([-2.0, -1.0, -1.0]) == 1
