"""Read the field ``diffusion`` of a request body, and encode the texts of a request."""

from typing import Any, NamedTuple

from dllm_plugin.config.request.arguments import EARLY_TEXT, FRAMES, STATISTICS, TRACE
from dllm_plugin.config.request.checks import check_characters
from dllm_plugin.config.validation import shown
from dllm_plugin.infilling.gaps import beginning


class Asked(NamedTuple):
    """Store the fields of ``diffusion``; an empty object asks for counts.

    every    a frame every so many forwards; 0: none
    lengths  how many positions to fill before a suffix; None: max_tokens
    """

    every: int = 0
    early_text: bool = False
    trace: bool = False
    lengths: Any = None

    def arguments(self) -> dict[str, int]:
        """Return the engine's request arguments for this."""
        asked = {
            FRAMES: self.every,
            EARLY_TEXT: int(self.early_text),
            TRACE: int(self.trace),
        }
        return {STATISTICS: 1} | {name: value for name, value in asked.items() if value}


FIELDS = ("early_text", "frames", "lengths", "trace")


def read_fields(body: Any, streams: bool) -> Asked:
    """Read the object. Raises ValueError with one sentence."""
    if not isinstance(body, dict):
        raise ValueError(f"diffusion must be an object, got {shown(body)}.")
    for name in sorted(set(body) - set(FIELDS)):
        raise ValueError(
            f"Unknown field {shown(name)} in diffusion; known: {', '.join(FIELDS)}."
        )
    every = _every(body.get("frames", False))
    early_text, trace = (_switch(body, name) for name in ("early_text", "trace"))
    for name, asked in (("frames", every), ("early_text", early_text)):
        if asked and not streams:
            raise ValueError(f'diffusion.{name} needs "stream": true.')
    return Asked(every, early_text, trace, body.get("lengths"))


def _switch(body: dict[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"diffusion.{name} must be true or false, got {shown(value)}.")
    return value


def _every(frames: Any) -> int:
    if isinstance(frames, bool):
        return int(frames)
    if not isinstance(frames, dict) or set(frames) - {"every"}:
        raise ValueError(
            f'diffusion.frames must be true, false or {{"every": n}}, got {shown(frames)}.'
        )
    every = frames.get("every", 1)
    if isinstance(every, bool) or not isinstance(every, int):
        raise ValueError(
            f"diffusion.frames.every must be a whole number, got {shown(every)}."
        )
    if every < 1:
        raise ValueError(
            f"diffusion.frames.every must be at least 1, got {shown(every)}."
        )
    return every


class Encoder:
    """Encode texts with a server's tokenizer, each as a part of a prompt."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.tokenizer = tokenizer
        self.context = context

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other text."""
        return self._encode(text, special=False)

    def first(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a prompt; of an empty text the token that begins texts."""
        return self._encode(text, special) or beginning(self.tokenizer)

    def _encode(self, text: str, special: bool) -> list[int]:
        # Other requests wait meanwhile, so nothing is encoded that cannot fit.
        fewest = len(text) // self.tokenizer.max_chars_per_token
        if fewest > self.context:
            raise ValueError(
                f"A text of {len(text)} characters has at least {fewest} tokens, but the context "
                f"holds {self.context}: shorten it."
            )
        check_characters("A text of the request", text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text
