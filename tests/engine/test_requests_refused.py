"""Wrong requests get one clear sentence that names the parameter; everybody else is served."""

from typing import Any

import pytest
from engines import (
    EngineRoom,
    a_prompt,
    forwards,
    free_pages,
    generate,
    params,
    token_ids,
)
from jobs import job

GOOD = job(20, 40, 16, seed=1, threshold=0.6)
TEXT = a_prompt(6)
HALF = "\ud800"  # of a surrogate pair
D2F = {"strategy": "d2f"}
BLOCKS = {"strategy": "block_diffusion"}

WRONG_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"bad_words": ["q" * 17]}, "bad_words holds a word of 17 tokens"),
    ({"prompt_logprobs": 2}, "prompt_logprobs"),
    ({"dllm_speed": 3}, "dllm_speed"),
    ({"dllm_strategy": "d2f"}, "dllm_strategy"),
    ({"dllm_canvas_length": 64}, "dllm_canvas_length"),
    ({"dllm_threshold": 1.5}, "dllm_threshold"),
    ({"dllm_threshold": -0.1}, "dllm_threshold"),
    ({"dllm_threshold": "high"}, "dllm_threshold"),
    ({"dllm_threshold": True}, "dllm_threshold"),
    ({"dllm_threshold": None}, "dllm_threshold"),
    ({"dllm_threshold": float("nan")}, "dllm_threshold"),
    ({"dllm_block_add_threshold": 2}, "dllm_block_add_threshold"),
    ({"dllm_decoded_token_threshold": [0.5]}, "dllm_decoded_token_threshold"),
    ({"dllm_block_length": 0}, "dllm_block_length"),
    ({"dllm_block_length": -4}, "dllm_block_length"),
    ({"dllm_block_length": 129}, "dllm_block_length"),
    ({"dllm_block_length": 16.0}, "dllm_block_length"),
    ({"dllm_block_length": "16"}, "dllm_block_length"),
    ({"dllm_max_active_blocks": 0}, "dllm_max_active_blocks"),
    ({"dllm_max_active_blocks": 1000}, "dllm_max_active_blocks"),
    ({"dllm_steps": 4}, "dllm_steps"),
    ({"dllm_eps": 0.1}, "dllm_eps"),
    ({"dllm_factor": 0.5}, "dllm_factor"),
    ({"dllm_policy": "factor"}, "dllm_policy"),
    ({"dllm_policy": "origin"}, "dllm_policy"),
    ({"dllm_policy": "best"}, "dllm_policy"),
    ({"dllm_policy": 3}, "dllm_policy"),
]
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"dllm_steps": 4}, "dllm_steps"),
    ({"dllm_policy": "low_confidence", "dllm_threshold": 0.5}, "dllm_threshold"),
    ({"dllm_policy": "low_confidence", "dllm_steps": 0}, "dllm_steps"),
    ({"dllm_policy": "low_confidence", "dllm_steps": 4000}, "dllm_steps 4000 exceeds"),
    ({"dllm_policy": "low_confidence", "dllm_eps": 0.1}, "dllm_eps"),
    ({"dllm_policy": "factor", "dllm_factor": -1.0}, "dllm_factor"),
    ({"dllm_policy": "threshold", "dllm_factor": 1.0}, "dllm_factor"),
    ({"dllm_block_add_threshold": 0.5}, "dllm_block_add_threshold"),
    (
        {"dllm_policy": "factor", "dllm_block_add_threshold": 0.5},
        "dllm_block_add_threshold",
    ),
]


def refused() -> tuple[type[Exception], ...]:
    """What vLLM raises for a wrong request."""
    from vllm.exceptions import VLLMValidationError

    return (ValueError, VLLMValidationError)


def refusal(llm: Any, prompt: list[int], wish: Any) -> str:
    """The message of a refused request, which leaves nothing behind."""
    with pytest.raises(refused()) as caught:
        generate(llm, [prompt], wish)
    assert not llm.llm_engine.has_unfinished_requests()
    message = str(caught.value)
    assert "\n" not in message.strip()
    return message


def assert_unharmed(llm: Any) -> None:
    [output] = generate(llm, [list(GOOD.prompt)], GOOD.wish())
    assert (token_ids(output), forwards(output)) == GOOD.expected("llada")


@pytest.mark.parametrize(("options", "name"), WRONG_PARAMETERS, ids=str)
def test_parameter(options: dict[str, Any], name: str, llm: Any) -> None:
    message = refusal(llm, TEXT, params(20, **options))
    assert name in message
    assert message.removesuffix(" (parameter=bad_words)").endswith(".")


UNSENDABLE: list[tuple[dict[str, Any], str]] = [
    (
        {"extra_args": {"dllm_block_length": 24, "other": HALF}},
        "extra_args holds '\\ud800' in",
    ),
    ({"extra_args": {"dllm_policy": HALF}}, "extra_args holds '\\ud800' in"),
    (
        {"extra_args": {"other": [1, ["a", f"b{HALF}"]]}},
        "'\\ud800' in 'b\\ud800', half of",
    ),
    ({"extra_args": {HALF: 1}}, "extra_args holds '\\ud800' in"),
    ({"stop": ["a", HALF]}, "stop holds '\\ud800' in"),
    ({"bad_words": [f"{HALF}a"]}, "bad_words holds '\\ud800' in '\\ud800a'"),
    ({"top_k": 2**63}, "top_k must be at most 2**63 - 1, got 9223372036854775808"),
]


@pytest.mark.parametrize(("options", "name"), UNSENDABLE, ids=ascii)
def test_what_cannot_be_sent(options: dict[str, Any], name: str, llm: Any) -> None:
    """Half a surrogate pair, wherever it stands, and integers of more than 64 bits."""
    from vllm import SamplingParams

    assert name in refusal(llm, TEXT, SamplingParams(max_tokens=9, **options))


def test_they_left_the_engine_unharmed(llm: Any) -> None:
    assert_unharmed(llm)


@pytest.mark.parametrize(("options", "name"), WITHOUT_EFFECT, ids=str)
def test_parameter_without_effect(
    options: dict[str, Any], name: str, room: EngineRoom
) -> None:
    """What the chosen strategy and policy would never read is not accepted in silence."""
    assert name in refusal(room.start("llada", BLOCKS), TEXT, params(20, **options))


CONTRADICTING: list[dict[str, Any]] = [
    {"min_tokens": 3},
    {"ignore_eos": True},
    {"bad_words": ["no"]},
    {"allowed_token_ids": [64, 65]},
    {"logit_bias": {64: float("-inf")}},
    {"dllm_early_text": 1},
]


# What no backend of a request reads.
UNREAD: list[tuple[dict[str, Any], str]] = [
    (
        {
            "json": {
                "type": "object",
                "properties": {"a": {}},
                "patternProperties": {"^b": {"type": "array", "uniqueItems": True}},
            }
        },
        'json has the keywords "uniqueItems": neither xgrammar nor guidance reads',
    ),
    ({"regex": "a+", "whitespace_pattern": " "}, "whitespace_pattern ' '"),
    ({"regex": "a+", "disable_any_whitespace": True}, "disable_any_whitespace True"),
    (
        {"json": {"type": "integer", "not": {"const": 1}}},
        'json has the keywords "not": neither xgrammar',
    ),
    (
        {"json": {"oneOf": [{"type": "null"}, {"const": None}]}},
        "alternatives that may overlap",
    ),
]


def test_parameters_that_contradict_a_grammar(llm: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    for options in CONTRADICTING:
        asked = StructuredOutputsParams(regex="[a-z]+")
        wish = params(
            20, **{"ignore_eos": False, "structured_outputs": asked} | options
        )
        [name] = options
        message = refusal(llm, TEXT, wish)
        assert name in message and "structured_outputs" in message
    for options, sentence in UNREAD:
        asked = StructuredOutputsParams(**options)
        wish = params(20, ignore_eos=False, structured_outputs=asked)
        assert sentence in refusal(llm, TEXT, wish)
    assert_unharmed(llm)


def test_rules_that_leave_no_token(llm: Any) -> None:
    """Words and ends of texts are known as tokens only to the tokenizer."""
    tokenizer = llm.get_tokenizer()
    [letter] = tokenizer.encode("a", add_special_tokens=False)
    end = tokenizer.eos_token_id
    banned = {"bad_words": ["a"], "allowed_token_ids": [letter]}
    assert "bad_words bans every token of allowed_token_ids" in refusal(
        llm, TEXT, params(9, **banned)
    )
    early = {"allowed_token_ids": [end], "min_tokens": 2}
    assert "min_tokens 2 cannot be reached" in refusal(llm, TEXT, params(9, **early))
    for ids in (
        {"allowed_token_ids": [letter, letter + 1]},
        {"allowed_token_ids": [end, letter]},
    ):
        [output] = llm.generate(
            [{"prompt_token_ids": TEXT}], params(9, **early | ids), use_tqdm=False
        )
        assert set(output.outputs[0].token_ids) <= {end, *ids["allowed_token_ids"]}
    assert_unharmed(llm)


def test_prompts(llm: Any) -> None:
    assert "mask token (id 300)" in refusal(llm, [1, 300, 2], params(20))
    assert "empty" in refusal(llm, [], params(20))
    for length in (256, 257, 1000):
        message = refusal(llm, a_prompt(length), params(20))
        assert "256" in message
        assert "context" in message or "maximum" in message
    with pytest.raises(refused(), match="mask token"):
        llm.generate("before <|mdm_mask|> after", params(20), use_tqdm=False)
    assert_unharmed(llm)


def test_beam_search(llm: Any) -> None:
    """It would decode from left to right, a token at a time."""
    from vllm.sampling_params import BeamSearchParams

    for temperature in (0.0, 0.7):
        wish = BeamSearchParams(beam_width=2, max_tokens=4, temperature=temperature)
        with pytest.raises(refused(), match="use_beam_search is not supported"):
            llm.beam_search([{"prompt_token_ids": TEXT}], wish)
    assert_unharmed(llm)


def test_a_refusal_between_neighbours(llm: Any) -> None:
    """Requests in flight neither stop nor change when another one is refused."""
    engine, pages = llm.llm_engine, free_pages(llm)
    jobs = [GOOD, job(33, 50, 16, seed=2)]
    wrong = [
        ([1, 300], params(20)),
        ([1], params(20, dllm_threshold=2)),
        ([], params(20)),
    ]
    done = {}
    for i, one in enumerate(jobs):
        engine.add_request(str(i), {"prompt_token_ids": list(one.prompt)}, one.wish())
    step = 0
    while engine.has_unfinished_requests():
        done |= {
            output.request_id: output for output in engine.step() if output.finished
        }
        prompt, wish = wrong[step % 3]
        with pytest.raises(refused()):
            engine.add_request(f"wrong{step}", {"prompt_token_ids": prompt}, wish)
        step += 1
    for i, one in enumerate(jobs):
        got = token_ids(done[str(i)]), forwards(done[str(i)])
        assert got == one.expected("llada")
    assert free_pages(llm) == pages
