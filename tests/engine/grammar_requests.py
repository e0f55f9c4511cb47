"""Requests with a grammar of each kind, and the engines that decode them."""

import json
import random
import re
from typing import Any

from engines import (
    free_pages,
    generate,
    letters,
    params,
    token_ids,
)
from grammar_cases import (
    Case,
    choice_case,
    grammar_case,
    regex_case,
    schema_case,
    valid,
)

EOS = {"llada": 257, "dream": 256}
# checkpoint, strategy, asynchronous scheduling: every way to plan a step once.
WAYS = [
    ("llada", "d2f", True),
    ("dream", "block_diffusion", False),
    ("sdar", "block_diffusion, single blocks", True),
    ("fast-dllm-v2", "block_diffusion", False),
    ("llada2.1", "block_diffusion", False),
    ("llada", "semi_autoregressive", True),
    ("dream", "dual_cache", True),
    ("llada", "prefix_cache", True),
    ("llada2.0", "block_diffusion, single blocks", True),
    ("sdar-moe", "block_diffusion", False),
    ("nemotron", "block_diffusion", True),
    ("wedlm", "causal_window", False),
]
CALL = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = [{"type": "tag", "begin": "<call>", "content": CALL, "end": "</call>"}]
TAG = {
    "type": "triggered_tags",
    "triggers": ["<call>"],
    "tags": TAGS,
    "at_least_one": True,
}
# vLLM gives this to guidance; xgrammar would take any integers for it.
NUMBERS = {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 999}
SEVENS = {"type": "array", "items": NUMBERS, "minItems": 3}


def wish(kind: str, spec: Any, max_tokens: int, **options: Any) -> Any:
    """Parameters of a request with a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    asked = StructuredOutputsParams(**{kind: spec})
    return params(max_tokens, ignore_eos=False, structured_outputs=asked, **options)


def cases() -> list[Case]:
    """One of each kind, and some schemas."""
    rng = random.Random(3)
    names = (
        "answer",
        "nested",
        "optional",
        "any_of",
        "bounded_list",
        "recursive",
        "nothing_long",
    )
    return [
        *map(schema_case, names),
        *(regex_case(rng), choice_case(rng), grammar_case(rng), grammar_case(rng)),
        Case("json_object", True, lambda text: isinstance(json.loads(text), dict)),
        Case("json", SEVENS, valid(SEVENS)),
        Case(
            "structural_tag",
            json.dumps(
                {"type": "structural_tag", "format": TAG | {"stop_after_first": True}}
            ),
            lambda text: (
                re.fullmatch("<call>-?(0|[1-9][0-9]*)</call>", text) is not None
            ),
        ),
    ]


def same_for_any_drafts(llm: Any, ways: list[dict[str, Any]]) -> None:
    """Texts are complete, and those of the first way; free neighbours keep theirs."""
    asked, pages = cases(), free_pages(llm)
    prompts = [letters(5 + i, i) for i in range(len(asked))]
    free = [letters(9), letters(12, 1)]
    alone = [token_ids(output) for output in generate(llm, free, params(24))]
    # Blanks that JSON allows are near ties of a tiny model that is greedy.
    for options, first in (({"temperature": 1.0, "seed": 5}, 0), ({"logprobs": 2}, 7)):
        texts = []
        for way in ways:
            wishes = [
                wish(case.kind, case.spec, 40, **options, **way)
                for case in asked[first:]
            ]
            outputs = generate(
                llm, prompts[first:] + free, wishes + [params(24)] * len(free)
            )
            for case, output in zip(asked[first:], outputs, strict=False):
                [completion] = output.outputs
                assert case.judge(completion.text), (case.kind, completion.text)
                for place, token in enumerate(
                    completion.token_ids if completion.logprobs else ()
                ):
                    assert token in completion.logprobs[place]
            texts.append([token_ids(output) for output in outputs])
            assert texts[-1][-len(free) :] == alone
        assert texts == texts[:1] * len(ways)
    assert free_pages(llm) == pages
