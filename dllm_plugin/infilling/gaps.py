"""Convert text with gaps to a prompt and a template, and answers back to fills."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.arguments import end_of_gaps
from dllm_plugin.config.validation import WholeNumber, shown

# How many positions a gap has: one of these is chosen; none are named: any that fits.
Lengths = tuple[int, ...]
Part = str | Lengths
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
AUTO = "auto"
ANY: Lengths = ()
MOST_LENGTHS = 16
MARK = re.compile(r"\[MASK:([^\[\]]*)\]")
WHOLE = re.compile(r"\d{1,18}")
FORMS = f"write [MASK:4], [MASK:2,4] for one of two lengths, or [MASK:{AUTO}]"
SOURCES = ("text", "parts", "draft")


class Gapped(NamedTuple):
    """Describe a text with gaps as the engine takes it; every gap has one length.

    pieces  what follows the prompt: tokens and text of a part, or no tokens if it is a gap
    """

    parts: list[Part]
    prompt: list[int]
    pieces: list[list[int]]

    @property
    def template(self) -> list[int]:
        """Return the positions after the prompt."""
        return [token for piece in self.pieces for token in piece]

    @property
    def end(self) -> int:
        """Return where the last gap stops."""
        return end_of_gaps(self.template)

    @property
    def tail(self) -> list[int]:
        """Return the tokens after the last gap."""
        return self.template[self.end :]

    @property
    def given(self) -> list[int]:
        """Return the tokens after the prompt that are no gap."""
        return [token for token in self.template if token != FILL]

    @property
    def num_gaps(self) -> int:
        """Return how many gaps there are."""
        return sum(not isinstance(part, str) for part in self.parts)


class Filled(NamedTuple):
    """Describe one fill: its text up to the first end token, its tokens, its place."""

    text: str
    tokens: list[int]
    first: int


def parts_of(body: dict[str, Any], encode: Encode) -> list[Part]:
    """Return the parts of a request. Raises ValueError with one sentence."""
    given = [name for name in SOURCES if body.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"infill needs one of {', '.join(SOURCES)}, got {len(given)} of them."
        )
    for name in ("rewrite", "slack"):
        if body.get(name) is not None and given != ["draft"]:
            raise ValueError(f"{name} has no effect without draft: leave it out.")
    [source] = given
    read = {"text": _of_text, "parts": _of_parts, "draft": _of_draft}[source]
    parts = _joined([part for part in read(body, encode) if part != ""])
    if all(isinstance(part, str) for part in parts):
        forms = f"; {FORMS}" if source == "text" else ""
        raise ValueError(f"{source} has no gap: nothing is to be filled{forms}.")
    return parts


def parts_of_text(text: str) -> list[Part]:
    """Return the parts of a text with [MASK:n]. Raises ValueError with one sentence."""
    return parts_of({"text": text}, lambda _: [])


def _of_text(body: dict[str, Any], encode: Encode) -> list[Part]:
    if not isinstance(body["text"], str):
        raise ValueError(f"text must be text with [MASK:n], got {shown(body['text'])}.")
    pieces = MARK.split(body["text"])
    return [_marked(piece) if i % 2 else piece for i, piece in enumerate(pieces)]


def _marked(written: str) -> Part:
    if written == AUTO:
        return ANY
    lengths = [int(part) for part in written.split(",") if WHOLE.fullmatch(part)]
    if len(lengths) <= written.count(",") or not all(lengths):
        gap = shown(f"[MASK:{written}]")
        raise ValueError(f"{gap} names no lengths of 1 position or more: {FORMS}.")
    return _lengths(lengths)


def _of_parts(body: dict[str, Any], encode: Encode) -> list[Part]:
    parts = body["parts"]
    if not isinstance(parts, list):
        raise ValueError(
            f'parts must be a list of texts and {{"mask": n}}, got {shown(parts)}.'
        )
    read: list[Part] = []
    for part in parts:
        if isinstance(part, dict) and set(part) == {"mask"}:
            read.append(ANY if part["mask"] == AUTO else _lengths(part["mask"]))
        elif isinstance(part, str):
            read.append(part)
        else:
            raise ValueError(
                f'parts must be texts and {{"mask": n}}, got {shown(part)}.'
            )
    return read


def _of_draft(body: dict[str, Any], encode: Encode) -> list[Part]:
    draft = body["draft"]
    spans = body.get("rewrite")
    slack = body.get("slack", 0)
    if not isinstance(draft, str):
        raise ValueError(f"draft must be text, got {shown(draft)}.")
    WholeNumber(0)("slack", slack)
    parts: list[Part] = []
    at = 0
    for span in spans if isinstance(spans, list) else [spans]:
        known = isinstance(span, list) and [type(end) for end in span] == [int, int]
        if not known or not at <= span[0] < span[1] <= len(draft):  # type: ignore[index]
            raise ValueError(
                f"rewrite must be a list of [start, stop] in order and within the {len(draft)} "
                f"characters of draft, got {shown(span)}."
            )
        start, stop = span  # type: ignore[misc]
        parts += [draft[at:start], _lengths(len(encode(draft[start:stop])) + slack)]
        at = stop
    return [*parts, draft[at:]]


def _lengths(given: Any) -> Lengths:
    """Return the lengths of a gap, ascending, from one integer or a list."""
    lengths = given if isinstance(given, list) else [given]
    for length in lengths:
        if type(length) is not int or length < 1:
            raise ValueError(
                f"A gap must have at least 1 position, a whole number, got {shown(length)}."
            )
    if not 1 <= len(lengths) <= MOST_LENGTHS:
        raise ValueError(
            f"A gap must have 1 to {MOST_LENGTHS} lengths, got {len(lengths)}."
        )
    return tuple(sorted(set(lengths)))


def _joined(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind: two gaps without text between them are one gap."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, str) and isinstance(part, str):
            joined[-1] = last + part
        elif last is None or isinstance(last, str) or isinstance(part, str):
            joined.append(part)
        else:
            joined[-1] = _sum(last, part)
    return joined


def _sum(one: Lengths, other: Lengths) -> Lengths:
    if ANY in (one, other):
        raise ValueError(
            f"A gap of length {AUTO} needs text between it and another gap."
        )
    sums = {a + b for a in one for b in other}
    if len(sums) > MOST_LENGTHS:
        raise too_many(len(sums))
    return tuple(sorted(sums))


def too_many(count: int) -> ValueError:
    """Return what to raise for more lengths than are tried."""
    written = str(count) if count < 10**9 else "over a billion"
    return ValueError(
        f"The lengths of the gaps make {written} combinations, at most {MOST_LENGTHS} are "
        "tried: name fewer."
    )


def beginning(tokenizer: Any) -> list[int]:
    """Return the token that begins texts, or else ends them: the prompt of an empty text.

    Raises:
        ValueError: if the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise ValueError(
        "The first text is empty, and the tokenizer has no token that begins texts: "
        "write some text there."
    )


def place(
    parts: list[Part], prompt: list[int] | None, first: Encode, rest: Encode
) -> Gapped:
    """Place text and gaps as prompt and template.

    Args:
        parts: text, and gaps of one length.
        prompt: what a chat template made of messages; None: text before the first gap is the
            prompt.
        first, rest: encode the first part, which is never empty, and later parts.
    """
    if prompt is None:
        text = parts[0] if isinstance(parts[0], str) else ""
        prompt, later = first(text), parts[1:] if text else parts
    else:
        later = parts
    pieces = []
    for part in later:
        if isinstance(part, str):
            pieces.append(rest(part))
        else:
            [length] = part
            pieces.append([FILL] * length)
    return Gapped(parts, prompt, pieces)


def filled(
    gapped: Gapped, token_ids: list[int], ends: set[int], decode: Decode
) -> list[Filled]:
    """Return what the gaps got, in order."""
    found, at = [], 0
    for piece in gapped.pieces:
        if FILL in piece:
            tokens = token_ids[at : at + len(piece)]
            stop = next(
                (i for i, token in enumerate(tokens) if token in ends), len(tokens)
            )
            found.append(Filled(decode(tokens[:stop]), tokens[:stop], at))
        at += len(piece)
    return found


def cut(gap: Filled, stop: str, keeps: bool) -> Filled:
    """Return a gap that a stop string ended, with its text up to there."""
    before, found, _ = gap.text.partition(stop)
    return gap._replace(text=before + found if keeps else before)


def together(gapped: Gapped, gaps: list[Filled]) -> str:
    """Return the whole text."""
    texts = iter(gaps)
    return "".join(
        part if isinstance(part, str) else next(texts).text for part in gapped.parts
    )
