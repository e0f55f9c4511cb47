"""``vllm serve`` on a plain checkpoint with nothing said about decoding: dual cache, threshold."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engines import LETTERS, a_prompt, letters
from full_jobs import FullJob
from jobs import plain_model
from processes import SETTINGS, Server
from streams import assert_by_blocks

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

DECODER = ("llada", "dual_cache")
CANVAS = 256
PROMPT = letters(20, 2)
READABLE = {"allowed_token_ids": LETTERS, "ignore_eos": True, "max_tokens": 80}
JOBS = [
    FullJob(a_prompt(9, 1), 40),
    FullJob(
        a_prompt(30, 2),
        64,
        {"policy": "low_confidence", "steps": 8, "block_length": 16},
    ),
    FullJob(
        a_prompt(45, 3), 33, {"policy": "factor", "factor": 1.0, "block_length": 8}
    ),
    FullJob(
        a_prompt(5, 4),
        70,
        {"policy": "threshold", "threshold": 0.6, "block_length": 32},
    ),
    FullJob(a_prompt(17, 5), 48, {"policy": "entropy", "steps": 5, "block_length": 16}),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vllm_xargs": {"dllm_cfg_scale": 0.5}}, "dllm_cfg_scale has no effect"),
    ({"vllm_xargs": {"dllm_threshold": 2}}, "dllm_threshold must be a number between"),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 3},
        "min_tokens 3 can contradict the grammar of structured_outputs",
    ),
    ({"prompt": [1, 300, 2]}, "The prompt contains the mask token (id 300)"),
    ({"prompt": a_prompt(256)}, "256"),
]


@pytest.fixture
def server(tiny_server: Server) -> Server:
    return tiny_server


def expected(job: FullJob) -> list[int]:
    given = {"block_length": 32, "canvas_length": CANVAS} | job.numbers
    rules, context = Rules("dual_cache", **given), int(str(SETTINGS["max_model_len"]))
    model = plain_model("llada")
    return decode(Text(model, job.prompt, job.max_tokens, rules, (), context)).tokens


def ask(server: Server, job: FullJob) -> list[int]:
    numbers = {f"dllm_{name}": value for name, value in job.numbers.items()}
    answer = server.complete(
        job.prompt,
        max_tokens=job.max_tokens,
        ignore_eos=True,
        return_token_ids=True,
        **({"vllm_xargs": numbers} if numbers else {}),
    )
    [choice] = answer["choices"]
    assert answer["usage"]["completion_tokens"] == job.max_tokens
    return list(choice["token_ids"])


def test_the_choice_and_its_reason_are_logged_once(server: Server) -> None:
    [line] = [
        line for line in server.log.read_text().splitlines() if "Decoding LLaDA" in line
    ]
    assert (
        "by dual_cache with policy threshold" in line and "no adapter is given" in line
    )


def test_concurrent_policies_and_wrong_requests(server: Server) -> None:
    """Everybody gets the text of its own numbers, whatever the neighbours ask for."""
    with ThreadPoolExecutor(len(JOBS)) as pool:
        answers = [pool.submit(ask, server, job) for job in JOBS]
        for options, sentence in WRONG:
            response = server.post(
                "completions", {"prompt": PROMPT, "max_tokens": 20} | options
            )
            assert response.status_code == 400, (options, response.text)
            assert sentence in response.json()["error"]["message"], options
        for job, answer in zip(JOBS, answers, strict=True):
            assert answer.result() == expected(job), job


def test_streamed_block_by_block(server: Server) -> None:
    small = {"dllm_block_length": 8, "dllm_threshold": 0.5}
    whole = server.complete(PROMPT, **READABLE, vllm_xargs=small)
    body = {
        "prompt": PROMPT,
        "vllm_xargs": small,
        "stream_options": {"include_usage": True},
    }
    chunks = list(server.stream("completions", body | READABLE))
    texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert_by_blocks(texts, 8)
    assert chunks[-1]["usage"].items() <= whole["usage"].items()


def test_seed_stop_and_logprobs(server: Server) -> None:
    """LLaDA's Gumbel noise: the same text for the same seed, cut and scored as usual."""
    hot = READABLE | {"temperature": 0.8, "seed": 11, "n": 2}
    first, again = (server.complete(PROMPT, **hot)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in again]
    assert len(set(texts)) == 2
    text = texts[0]
    wish = hot | {"n": 1, "stop": [text[30:33]], "logprobs": 2}
    [choice] = server.complete(PROMPT, **wish)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (
        text[: text.index(text[30:33])],
        "stop",
    )
    assert max(choice["logprobs"]["token_logprobs"]) <= 0
