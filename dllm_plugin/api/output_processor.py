"""Mend two replies of vLLM's output processor.

A prompt may end amid a character. vLLM's detokenizer would begin the reply with the text of the
whole prompt, and look for stop strings there: it waits for the end of a character before it takes a
text as known. The reply begins with that character.

A grammar may be refused by the engine only. vLLM's handlers answer with an internal error; the
reply is a refusal that names the field.
"""

import copy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError

from dllm_plugin.config.request.structured_outputs import SENT_AS

from .answers import refusal
from .frames import BROKEN, LONGEST_CHARACTER

# Why the engine refuses the grammar of an HTTP request; one list a request.
REFUSED: ContextVar[list[str]] = ContextVar("REFUSED")


class MendedOutputs:
    """Add requests to vLLM's output processor, and process outputs, as it does but for both.

    grammars  the field of a body that has a grammar, and where to say why it is refused
    """

    request_states: dict[str, Any]
    tokenizer: Any
    grammars: WeakKeyDictionary[Any, tuple[str, list[str]]]

    def add_request(self, request: Any, *args: Any, **options: Any) -> None:
        """Add a request; its text begins at most at the character that its prompt began."""
        super().add_request(request, *args, **options)  # type: ignore[misc]
        ids, state = request.prompt_token_ids, self.request_states[request.request_id]
        if request.sampling_params and request.sampling_params.structured_outputs:
            self.grammars[state] = SENT_AS.get(), REFUSED.get([])
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

    def process_outputs(
        self, outputs: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        """Process outputs; a request whose grammar was refused raises a sentence."""
        for output in outputs if self.grammars else ():
            if output.finish_reason is None:
                continue
            why, state = output.stop_reason, self.request_states.get(output.request_id)
            if str(output.finish_reason) == "error" and why and state:
                field, refused = self.grammars[state]
                refused.append(field + why.removeprefix("structured_outputs"))
                state.queue.put(VLLMValidationError(refused[0]))
        return super().process_outputs(outputs, *args, **options)  # type: ignore[misc]


def split(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens of a prompt up to the character that it begins, and those of it."""
    end = ids[-2 * LONGEST_CHARACTER :]
    for count in range(1, LONGEST_CHARACTER + 1):
        if not decode(end[:-count]).endswith(BROKEN):
            return ids[:-count], ids[-count:]
    return [], []  # only broken characters


def refusing(scope: Scope, receive: Receive, send: Send) -> Send:
    """Return a sender that replies to a stream whose grammar is refused before its first event."""
    refused: list[str] = []
    held: list[Message] = []
    REFUSED.set(refused)

    async def sent(message: Message) -> None:
        kind = Headers(raw=message.get("headers", ())).get("content-type", "")
        if kind.startswith("text/event-stream"):
            held.append(message)
            return
        if held and refused:
            if not message.get("more_body"):
                reply = refusal(refused[0])
                response = JSONResponse(reply.model_dump(), reply.error.code)
                await response(scope, receive, send)
            return
        if held:
            await send(held.pop())
        await send(message)

    return sent


def install(engine: Any) -> None:
    """Exchange the class of the output processor of an `AsyncLLM`."""
    processor = engine.output_processor
    bases = (MendedOutputs, type(processor))
    processor.__class__ = type(MendedOutputs.__name__, bases, {})
    processor.grammars = WeakKeyDictionary()
