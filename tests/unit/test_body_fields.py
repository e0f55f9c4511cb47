"""Fields of a body that its route would ignore: those of other servers and of other routes."""

import json
import re
from typing import Any

import pytest

from dllm_plugin.api.body_checks import check_body

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
COMPLETIONS, FIM = "/v1/completions", "/a/v1/fim/completions"
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"max_tokens": 9, "n_predict": 8}, "8 is not read here: send max_t"),
    (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of 3 is not read here: send n."),
    (CHAT, {"functions": [{"name": "f"}]}, "is not read here: send tools."),
    (CHAT, {"function_call": "auto"}, "'auto' is not read here: send tool_choice."),
    (
        CHAT,
        {"guided_json": {"a": 1}},
        "send structured_outputs json or response_format",
    ),
    (
        CHAT,
        {"guided_regex": "a"},
        "'a' is not read here: send structured_outputs regex",
    ),
    (CHAT, {"guided_choice": ["a"]}, "here: send structured_outputs choice."),
    (CHAT, {"guided_grammar": "a"}, "here: send structured_outputs grammar."),
    (CHAT, {"random_seed": 3, "seed": 4}, "random_seed 3 is not read here: send seed."),
    (COMPLETIONS, {"max_completion_tokens": 9}, "9 is not read here: send max_tokens."),
    ("/v1/responses", {"max_tokens": 9}, "is not read here: send max_output_tokens."),
    ("/v1/responses", {"response_format": {"a": 1}}, "is not read here: send text."),
    (MESSAGES, {"structured_outputs": {"regex": "a"}}, "here: send output_config."),
    (MESSAGES, {"diffusion": {}}, "diffusion is not read here: send it to /v1/chat/co"),
    (CHAT, {"threshold": 0}, "is not read here: send dllm_threshold in vllm_xargs."),
    (CHAT, {"frames": True}, "frames True is not read here: send diffusion."),
    (
        CHAT,
        {"vllm_xargs": {"policy": "a"}},
        "not read in vllm_xargs: send dllm_policy.",
    ),
    (CHAT, {"extra_body": {"a": 1}}, "not read here: send its fields themselves."),
    (CHAT, {"suffix": "a"}, "suffix is not read here: send it to /v1/completions."),
    (
        CHAT,
        {"vllm_xargs": {"dllm_frames": 1}},
        'Python: send "diffusion": {"frames": t',
    ),
    (MESSAGES, {"output_format": {"a": 1}}, "is not read here: send output_config."),
    (CHAT, {"vllm_xargs": {"dllm_early_text": 1}}, 'early_text needs "stream": true.'),
    (
        "/inference/v1/generate",
        {"sampling_params": {"extra_args": {"dllm_frames": 1}}},
        "dllm_frames 1 is for Python",
    ),
]
READ: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"max_tokens": 9, "max_new_tokens": 9, "n_predict": 9}),
    (COMPLETIONS, {"grammar": "", "guided_json": {}, "guided_choice": []}),
    (CHAT, {"top_p": 0.9, "top_k": 3, "template": None, "metadata": {"policy": "a"}}),
    ("/beta/completions", {"suffix": "a"}),
    (COMPLETIONS, {"best_of": 1, "suffix": "a", "diffusion": {}, "max_tokens": 9}),
    (COMPLETIONS, {"best_of": 2, "n": 2, "functions": [], "function_call": None}),
    (FIM, {"random_seed": 3, "suffix": "a"}),
    (CHAT, {"trace": False, "guided_json": False, "suffix": "", "n_predict": -1}),
    (CHAT, {"max_completion_tokens": 9, "max_new_tokens": 9, "function_call": "none"}),
    (CHAT, {"vllm_xargs": {"dllm_trace": 1}}),
    ("", {"best_of": 3, "guided_json": {"a": 1}, "diffusion": {}, "suffix": "a"}),
    (CHAT, {"max_completion_tokens": 9, "vllm_xargs": {"dllm_frames": 0}}),
    (MESSAGES, {"vllm_xargs": {"dllm_early_text": 1}, "stream": True, "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body", "sentence"), IGNORED, ids=str)
def test_what_a_route_would_ignore_is_refused(
    path: str, body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_body(json.dumps(body).encode(), path)


@pytest.mark.parametrize(("path", "body"), READ, ids=str)
def test_what_a_route_reads_is_taken(path: str, body: dict[str, Any]) -> None:
    check_body(json.dumps(body).encode(), path)
