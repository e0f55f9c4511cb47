"""Refuse bodies that vLLM's own checks answer with an internal error: ASGI middleware."""

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

from dllm_plugin.config.request.checks import check_characters, texts_of
from dllm_plugin.config.validation import shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SMALLEST, LARGEST = -(2**63), 2**64 - 1
OF_SCHEMAS = ("response_format", "structured_outputs", "tools", "text")
OBJECTS = ("structured_outputs", "stream_options")
REFUSAL = "refusal"
SUSPECT = re.compile(
    rb'"(?:structured_outputs|stream_options|refusal)"|\\u[dD][89a-fA-F]|:\s*\[\s*\]|\d{19}'
)


class BodyChecks:
    """Pass every request on but those with such a body."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        try:
            check_body(b"".join(message.get("body", b"") for message in messages))
        except ValueError as error:
            reply = create_error_response(
                str(error), "BadRequestError", HTTPStatus.BAD_REQUEST
            )
            response = JSONResponse(reply.model_dump(), status_code=reply.error.code)
            await response(scope, receive, send)
            return
        messages.reverse()

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, send)


def check_body(body: bytes) -> None:
    """Raise ValueError for fields that vLLM cannot send to its engine.

    Those are fields that must be objects, halves of surrogate pairs, and numbers beyond 64 bits.
    """
    if not SUSPECT.search(body):
        return
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return  # the route refuses it with the place of the error
    if not isinstance(fields, dict):
        return
    for name in OBJECTS:
        value = fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(
                f"{name} must be an object, got {shown(value)}: see the API's fields."
            )
    _check_input(fields.get("input"))
    for name, value in fields.items():
        if name not in OF_SCHEMAS:
            _check_numbers(name, value)
        check_characters("A name of the body", name)
        for text in texts_of(value):
            check_characters(name, text)


def _check_numbers(name: str, value: Any) -> None:
    """Raise ValueError for a whole number beyond 64 bits in a field."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, int) and not SMALLEST <= value <= LARGEST:
            raise ValueError(f"{name} must fit in 64 bits, got {shown(value)}.")


def _check_input(items: Any) -> None:
    """Raise ValueError for messages of /v1/responses that vLLM cannot read."""
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict) or item.get("role") != "assistant":
            continue
        parts = item.get("content")
        if parts == []:
            raise ValueError("input holds an assistant's message without content.")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") == REFUSAL:
                raise ValueError(
                    "input holds an assistant's refusal, which a chat template cannot "
                    "show: leave it out."
                )
