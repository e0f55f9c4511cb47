"""Make tokens of the texts of a request, and refuse those that no context could hold."""

from typing import Any

from dllm_plugin.config.request_checks import check_characters


class Encoder:
    """Encode texts with a server's tokenizer, each as a part of a prompt."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.tokenizer = tokenizer
        self.context = context

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text by itself, as it stands behind others."""
        return self._encode(text, special=False)

    def first(self, text: str) -> list[int]:
        """Return the tokens of a text that a prompt begins with."""
        return self._encode(text, special=True)

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
