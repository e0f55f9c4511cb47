"""Which tokens of a prompt begin a character that they do not end."""

from collections.abc import Sequence

import pytest

from dllm_plugin.api.begun_characters import split

ACCENT, PEPPER = "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{HOT PEPPER}"


def decode(ids: Sequence[int]) -> str:
    """Bytes are the tokens."""
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", [ACCENT, PEPPER])
@pytest.mark.parametrize("before", ["", "so ", ACCENT, PEPPER])
def test_prompts_cut_at_each_byte(text: str, before: str) -> None:
    known, whole = before.encode(), text.encode()
    for cut in range(1, len(whole)):
        assert split(known + whole[:cut], decode) == (known, whole[:cut])


def test_broken_prompts() -> None:
    """Bytes that begin nothing, and the replacement character itself."""
    assert split(b"\x80" * 20, decode) == ([], [])
    text = "a\N{REPLACEMENT CHARACTER}".encode()
    assert split(text, decode) == (b"a", text[1:])
