"""Serve the viewer: one page that shows frames, without code of other origins."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

NOT_OURS = "This server's model is no diffusion language model."
router = APIRouter()


@cache
def page() -> tuple[str, str]:
    """Return the page and its content security policy, which names what is inside by hash."""
    text = (
        resources.files("dllm_plugin.api")
        .joinpath("viewer.html")
        .read_text(encoding="utf-8")
    )
    script, style = (_hash_of(tag, text) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; "
        "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


def _hash_of(tag: str, text: str) -> str:
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def not_ours() -> Response:
    """Return the reply of our routes if another model is served."""
    error = {"message": NOT_OURS, "type": "NotFoundError", "param": None, "code": 404}
    return JSONResponse({"error": error}, status_code=404)


@router.get("/viewer", include_in_schema=False)
async def viewer(raw_request: Request) -> Response:
    """Return the page, which contains no secret and asks for the key itself."""
    if raw_request.app.state.diffuplug is None:
        return not_ours()
    text, policy = page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(text, headers=headers)
