"""Requests with gaps that are refused, and the sentence of each."""

from typing import Any

import pytest
from engines import (
    generate,
    params,
)

from dllm_plugin.reference.text import FILL

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dllm_template": 5}, "dllm_template must be a list of token ids"),
    ({"dllm_template": "[-1]"}, "dllm_template must be a list of token ids"),
    ({"dllm_template": []}, "dllm_template holds no position to fill (-1)."),
    ({"dllm_template": [5, 6]}, "dllm_template holds no position to fill (-1)."),
    ({"dllm_template": [-1, -2]}, "got -2 at place 1"),
    ({"dllm_template": [-1, 1.0]}, "got 1.0 at place 1"),
    ({"dllm_template": [-1, True]}, "got True at place 1"),
    ({"dllm_template": ["-1"]}, "got '-1' at place 0"),
    ({"dllm_template": [[-1]]}, "got [-1] at place 0"),
    (
        {"dllm_template": [-1] * 10**6},
        "The gaps and the text between them take 1000000 positions, canvas_length is 48: shorten "
        "them, or start the server with a larger canvas_length.",
    ),
    (
        {"dllm_template": [-1] * 4 + [300]},
        "dllm_template holds the mask token (id 300): write -1 for a position to fill.",
    ),
    (
        {"dllm_template": [-1] * 4 + [320]},
        "token id 320, but the vocabulary has 320 tokens",
    ),
    (
        {"dllm_template": [-1] * 4, "max_tokens": 7},
        "max_tokens is 7, but the last gap of dllm_template ends at 4: they must be equal.",
    ),
    (
        {"dllm_template": [-1] * 4, "dllm_cfg_scale": 0.5},
        "dllm_cfg_scale cannot be combined with dllm_template.",
    ),
    (
        {
            "dllm_template": [-1] * 4,
            "structured_outputs": {"regex": "a+"},
            "ignore_eos": False,
        },
        "structured_outputs cannot be combined with dllm_template.",
    ),
    (
        {"dllm_template": [-1] * 4, "dllm_suffix_window": 3},
        "suffix_window cannot be combined with",
    ),
    ({"dllm_template": [-1, 5, -1], "stop": ["a"]}, "stop needs a single gap, got 2."),
    (
        {"dllm_template": [-1, 5, -1], "stop_token_ids": [7]},
        "stop_token_ids needs a single gap",
    ),
    ({"dllm_template": [7, -1], "stop_token_ids": [7]}, "in front of its gap"),
]


def refusal(llm: Any, prompt: list[int], options: dict[str, Any]) -> str:
    """The sentence of a request that is refused."""
    given = options.get("dllm_template")
    end = len(given) if isinstance(given, list) and len(given) < 50 else 4
    if isinstance(given, list) and FILL in given:
        end = len(given) - given[::-1].index(FILL)
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in options:
        grammar = StructuredOutputsParams(**options["structured_outputs"])
        options = options | {"structured_outputs": grammar}
    with pytest.raises(VLLMValidationError) as caught:
        generate(llm, [prompt], params(**{"max_tokens": max(end, 1), **options}))
    return str(caught.value)
