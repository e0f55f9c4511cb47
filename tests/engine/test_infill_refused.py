"""Gaps over HTTP that are refused: one sentence each."""

import json
from typing import Any

import httpx
import pytest
from infill_requests import (
    CHOSEN,
    FIM,
    PARTS,
    PREFIX,
    TWO,
)

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "completions",
        FIM | {"prompt": [PREFIX, PREFIX]},
        "suffix needs one prompt of text, got a list of 2: send a string.",
    ),
    (
        "completions",
        FIM | {"prompt": [5, 6]},
        "suffix needs one prompt of text, got a list of 2: send a string.",
    ),
    ("completions", FIM | {"echo": True}, "echo cannot be combined with suffix."),
    (
        "completions",
        FIM | {"response_format": {"type": "json_object"}},
        "response_format and structured_outputs cannot be combined with suffix.",
    ),
    (
        "fim/completions",
        FIM | {"diffusion": {"lengths": [64]}},
        'lengths must be an integer, "auto" or at most 16 integers from 1 to max_tokens 12, got '
        "[64].",
    ),
    (
        "completions",
        FIM | {"suffix": None, "diffusion": {"lengths": 3}},
        "lengths needs a suffix",
    ),
    (
        "completions",
        CHOSEN | {"n": 2, "temperature": 0},
        "n must be 1 at temperature 0, and at least 1 above it, got 2.",
    ),
    (
        "completions",
        CHOSEN | {"stream": True, "diffusion": {"frames": True}},
        "diffusion.frames needs one length: give it as an integer.",
    ),
    (
        "completions",
        FIM | {"vllm_xargs": {"dllm_template": [-1]}},
        "dllm_template cannot be comb",
    ),
    (
        "infill",
        TWO | {"vllm_xargs": {"dllm_template": [-1]}},
        "combined with suffix or gaps: leav",
    ),
    (
        "completions",
        FIM | {"vllm_xargs": {"dllm_targets": [5]}},
        "holds 1 tokens, but the gaps and what follows them has 12 positions to fill",
    ),
    (
        "completions",
        CHOSEN | {"vllm_xargs": {"dllm_frames": 1}},
        "dllm_frames 1 is for Python: send ",
    ),
    (
        "infill",
        {"text": "a[MASK:auto]b[MASK:auto]c"},
        "make 36 combinations, at most 16 are tried",
    ),
    (
        "infill",
        TWO | {"diffusion": {"lengths": 3}},
        "lengths has no effect on /v1/infill",
    ),
    (
        "infill",
        {"text": "a [MASK:999999999]"},
        "gaps and the text between them take 999999999 pos",
    ),
    (
        "completions",
        FIM | {"max_tokens": 10**9, "diffusion": {"lengths": 10**9}},
        "take 10000000",
    ),
    (
        "completions",
        FIM | {"max_tokens": 300, "diffusion": {"lengths": 300}},
        "canvas_length is 256: shorten them, or start",
    ),
    (
        "fim/completions",
        FIM | {"suffix": "b " * 400},
        "tokens and the gaps and what follows them",
    ),
    (
        "fim/completions",
        FIM | {"suffix": "x" * 10**6},
        "A text of 1000000 characters has at least",
    ),
    (
        "infill",
        {"text": "a [MASK:3]" + "x" * 10**6},
        "A text of 1000000 characters has at least",
    ),
    ("infill", TWO | {"stop": ["a"]}, "stop needs a single gap, got 2."),
    ("infill", TWO | {"stream": True}, "stream needs a single gap, got 2."),
    ("infill", {"text": "no gap"}, "text has no gap: nothing is to be filled; write"),
    (
        "infill",
        {"text": "a [MASK:0]"},
        "'[MASK:0]' names no lengths of 1 position or more: write [MASK:4], [MASK:2,4] f",
    ),
    ("infill", {}, "infill needs one of text, parts, draft, got 0 of them."),
    ("infill", TWO | {"parts": PARTS}, "got 2 of them."),
    ("infill", TWO | {"slack": 1}, "slack has no effect without draft"),
    ("infill", {"parts": [["a"]]}, "parts must be texts and"),
    ("infill", {"parts": ["a", {"mask": "9"}]}, "got '9'."),
    (
        "infill",
        {"draft": "abc", "rewrite": [[2, 9]]},
        "within the 3 characters of draft",
    ),
    (
        "infill",
        {"text": "a\ud800 [MASK:2]"},
        "text holds '\\ud800' in 'a\\ud800 [MASK:2]', half of a surrogate",
    ),
    (
        "infill",
        {"text": "a [MASK:2]\udfff"},
        "half of a surrogate pair, which UTF-8 cannot carry",
    ),
    (
        "completions",
        FIM | {"prompt": "\ud800"},
        "half of a surrogate pair, which UTF-8 cannot",
    ),
    (
        "infill",
        TWO | {"add_special_tokens": False},
        "add_special_tokens has no effect on /v1/inf",
    ),
    (
        "infill",
        TWO | {"truncate_prompt_tokens": 3},
        "truncate_prompt_tokens has no effect on",
    ),
    (
        "infill",
        TWO | {"logprobs": 3},
        'logprobs has no effect on /v1/infill without "stream": t',
    ),
    (
        "infill",
        TWO | {"return_token_ids": True},
        "return_token_ids has no effect on /v1/infill",
    ),
    (
        "infill",
        TWO | {"messages": []},
        "messages must be a list of at least one message, got [].",
    ),
    (
        "infill",
        TWO | {"messages": 0},
        "messages must be a list of at least one message, got 0.",
    ),
    (
        "infill",
        {"text": "a" + "[MASK:1,9]" * 99},
        "combinations, at most 16 are tried: name fewer",
    ),
    (
        "completions",
        CHOSEN | {"max_tokens": -5},
        "suffix needs max_tokens of at least 1, got -5.",
    ),
    ("infill", TWO | {"max_tokens": 9}, "max_tokens has no effect on /v1/infill"),
    (
        "infill",
        {"text": "a [MASK:300]"},
        "The gaps and the text between them take 300 positions, canvas_length is 256: shorten "
        "them, or start the server with a larger canvas_length.",
    ),
    (
        "completions",
        FIM | {"suffix": "a<|mdm_mask|>b"},
        "The text around the gaps holds the mask token (id ",
    ),
    (
        "fim/completions",
        FIM | {"suffix": "b " * 400, "stream": True},
        "tokens and the gaps and what follows them",
    ),
    (
        "fim/completions",
        FIM | {"seed": 1, "random_seed": 2},
        "seed 1 and random_seed 2",
    ),
    ("infill", TWO | {"presence_penalty": 3}, "presence_penalty must be in [-2, 2]"),
    (
        "infill",
        TWO | {"diffusion": {"lenghts": 1}},
        "Unknown field 'lenghts' in diffusion",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "sentence"), REFUSED, ids=lambda value: ascii(value)[:40]
)
def test_refused_by_name(
    client: httpx.Client, path: str, body: dict[str, Any], sentence: str
) -> None:
    headers = {"Content-Type": "application/json"}
    reply = client.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    assert reply.status_code == 400, reply.text
    assert sentence in reply.json()["error"]["message"]
