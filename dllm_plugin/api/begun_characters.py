"""Begin the text of a reply with the character that its prompt ends amid.

vLLM's detokenizer would begin it with the text of the whole prompt, and look for stop strings
there: it waits for the end of a character before it takes a text as known.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from .frames import BROKEN, LONGEST_CHARACTER


class BegunCharacters:
    """Add requests to vLLM's output processor as it does, but for such prompts."""

    request_states: dict[str, Any]
    tokenizer: Any

    def add_request(self, request: Any, *args: Any, **options: Any) -> None:
        """Add a request; its text begins at most at the character that its prompt began."""
        super().add_request(request, *args, **options)  # type: ignore[misc]
        ids, state = request.prompt_token_ids, self.request_states[request.request_id]
        if not ids or state.detokenizer is None or self.tokenizer is None:
            return
        if not (self.tokenizer.is_fast and request.sampling_params.detokenize):
            return
        skips = request.sampling_params.skip_special_tokens

        def decode(ids: Sequence[int]) -> str:
            return str(self.tokenizer.decode(ids, skip_special_tokens=skips))

        if not decode(ids[-2 * LONGEST_CHARACTER :]).endswith(BROKEN):
            return
        known, begun = split(ids, decode)
        before = copy.copy(request)
        before.prompt_token_ids = known
        state.detokenizer = type(state.detokenizer)(self.tokenizer, before)
        for token in begun:
            state.detokenizer.decode_next(token)


def split(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens of a prompt up to the character that it begins, and those of it."""
    end = ids[-2 * LONGEST_CHARACTER :]
    for count in range(1, LONGEST_CHARACTER + 1):
        if not decode(end[:-count]).endswith(BROKEN):
            return ids[:-count], ids[-count:]
    return [], []  # only broken characters


def install(engine: Any) -> None:
    """Exchange the class of the output processor of an `AsyncLLM`."""
    processor = engine.output_processor
    bases = (BegunCharacters, type(processor))
    processor.__class__ = type(BegunCharacters.__name__, bases, {})
