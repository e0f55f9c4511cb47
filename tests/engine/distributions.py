"""Compare how often texts were sampled with how often a rule says they are."""

from collections.abc import Mapping, Sequence

Text = tuple[int, ...]


def check_frequencies(found: Sequence[Text], shares: Mapping[Text, float]) -> None:
    """Check that texts are as frequent as their shares say, and impossible ones absent."""
    assert abs(sum(shares.values()) - 1) < 1e-4
    assert {text for text, share in shares.items() if not share}
    assert {text for text in found if shares.get(text)} == set(found)
    count, rare, squares, freedom = len(found), [0.0, 0.0], 0.0, 0
    for text, share in shares.items():
        wanted, seen = share * count, found.count(text)
        if wanted >= 5:
            squares += (seen - wanted) ** 2 / wanted
            freedom += 1
        else:
            # Rare texts count as one, so that every expected number is large enough.
            rare[0] += wanted
            rare[1] += seen
    if rare[0]:
        squares += (rare[1] - rare[0]) ** 2 / rare[0]
    assert freedom > 15
    # Five standard deviations of the chi-squared distribution.
    assert squares < freedom + 5 * (2 * freedom) ** 0.5
