"""Serve the viewer: one page that shows frames, without code of other origins.

The files of `page/` refer to each other as if a browser opened them there; the server puts
them into one document, so that a path in front of its routes changes nothing.
"""

import base64
import hashlib
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

from dllm_plugin import __version__
from dllm_plugin.decoding.methods import methods_of

from .answers import Endpoints, encoder, endpoints, not_ours

PAGE = resources.files("dllm_plugin.api") / "page"
STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">')
SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>')
FACTS = '<script type="application/json" id="facts">{}</script>'
router = APIRouter()


@cache
def page(facts: str) -> tuple[str, str]:
    """Return the page and its content security policy, which names what is inside by hash.

    Args:
        facts: of :func:`facts_of`, as JSON.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(tag: str, name: str) -> str:
        content = (PAGE / name).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{content}</{tag}>"

    text = (PAGE / "index.html").read_text(encoding="utf-8")
    # Within JSON a tag can only begin in a string, where its first character may be escaped.
    text = text.replace(FACTS, FACTS.format(facts.replace("<", r"\u003c")))
    text = STYLE.sub(lambda match: inline("style", match[1]), text)
    text = SCRIPT.sub(lambda match: inline("script", match[1]), text)
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; "
        "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


def facts_of(raw_request: Request, ours: Endpoints) -> dict[str, Any]:
    """Return what the page knows of its server: nothing that needs a key.

    policies  those of the strategy, and the numbers that each reads
    fills     whether the server fills gaps
    filling   strategies of the model that do
    stops     the names of tokens that end an answer
    hidden    the names of special tokens, which no text has
    """
    config, encode = ours.config, encoder(raw_request)
    tokenizer = encode.tokenizer
    filling = []
    for strategy, method in methods_of(config.family).items():
        if method.full_attention:
            filling.append(strategy)
    policies = {}
    for policy in config.method.policies:
        policies[policy] = sorted(config.method.options_read(policy))
    stops = [tokenizer.decode([token]) for token in ours.ends(encode)]
    hidden = list(stops)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            hidden.append(token.content)
    app = raw_request.app
    return {
        "version": __version__,
        "model": app.state.openai_serving_completion.models.model_name(),
        "strategy": config.strategy,
        "policy": config.policy,
        "policies": policies,
        "threshold": config.defaults.threshold,
        "fills": config.method.full_attention,
        # The default strategy of the family first.
        "filling": filling[::-1],
        "stops": stops,
        "hidden": hidden,
        "docs": app.docs_url is not None,
    }


@router.get("/viewer", include_in_schema=False)
async def viewer(raw_request: Request) -> Response:
    """Return the page, which contains no secret and asks for the key itself."""
    ours = endpoints(raw_request)
    if ours is None:
        return not_ours()
    text, policy = page(json.dumps(facts_of(raw_request, ours)))
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(text, headers=headers)


@router.get("/", include_in_schema=False)
async def root(raw_request: Request) -> Response:
    """Return the page; vLLM has no route here, so another model gets its reply for none."""
    if endpoints(raw_request) is None:
        raise HTTPException(status_code=404)
    return await viewer(raw_request)
