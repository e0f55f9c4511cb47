"""The OpenAI server: ``vllm serve`` with the plugin, over HTTP."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from browsers import USED, browsing, viewers
from engines import LETTERS, a_prompt, letters
from jobs import MIXED, Job
from processes import Server, serving
from streams import assert_by_blocks

pytestmark = pytest.mark.usefixtures("template")

PROMPT = letters(20, 2)
READABLE = {"allowed_token_ids": LETTERS, "ignore_eos": True, "max_tokens": 80}
SMALL = {"dllm_block_length": 8, "dllm_threshold": 0.4}
MESSAGES = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, '--additional-config={"dllm": {"strategy": "d2f"}}') as server:
        yield server


def test_one_line_says_that_it_is_ready(server: Server) -> None:
    lines = [
        li
        for li in server.log.read_text().splitlines()
        if li.startswith("diffuplug: ready")
    ]
    assert len(lines) == 1
    assert server.url.removeprefix("http://127.0.0.1") in lines[0]
    assert "decoding d2f with policy threshold" in lines[0]


def ask(server: Server, one: Job) -> dict[str, Any]:
    """A job as a completion request."""
    numbers = {f"dllm_{name}": value for name, value in one.numbers}
    return server.complete(
        list(one.prompt),
        max_tokens=one.max_tokens,
        ignore_eos=True,
        return_token_ids=True,
        vllm_xargs={"dllm_block_length": one.block_length} | numbers,
    )


def test_concurrent_requests_with_their_own_numbers(server: Server) -> None:
    name = "vllm:diffusion_num_denoising_steps_total"
    before = sum(server.metrics(name).values())
    with ThreadPoolExecutor(len(MIXED)) as pool:
        answers = list(pool.map(lambda one: ask(server, one), MIXED))
    for one, answer in zip(MIXED, answers, strict=True):
        [choice] = answer["choices"]
        assert choice["token_ids"] == one.expected("llada")[0]
        assert choice["finish_reason"] == "length"
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(one.prompt)
        assert usage["completion_tokens"] == one.max_tokens
    forwards = sum(one.expected("llada")[1] for one in MIXED)
    deadline = time.monotonic() + 60
    while (
        sum(server.metrics(name).values()) - before < forwards
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    assert sum(server.metrics(name).values()) - before == forwards


def test_streamed_completion(server: Server) -> None:
    whole = server.complete(PROMPT, **READABLE, vllm_xargs=SMALL)
    body = {
        "prompt": PROMPT,
        "vllm_xargs": SMALL,
        "stream_options": {"include_usage": True},
    }
    chunks = list(server.stream("completions", body | READABLE))
    texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert len(whole["choices"][0]["text"]) == 80
    assert_by_blocks(texts, 8)
    assert chunks[-1]["usage"].items() <= whole["usage"].items()


def test_chat_streamed_and_not(server: Server) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "vllm_xargs": SMALL} | READABLE
    whole = server.post("chat/completions", body).json()
    chunks = list(server.stream("chat/completions", body))
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert_by_blocks(texts, 8)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_openai_client(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        temperature=0,
        max_tokens=40,
        extra_body={
            "vllm_xargs": SMALL,
            "allowed_token_ids": LETTERS,
            "ignore_eos": True,
        },
    )
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in stream)) == 40


def test_seed_and_n(server: Server) -> None:
    hot = READABLE | {"temperature": 1.5, "seed": 11, "n": 2}
    first, again = (server.complete(PROMPT, **hot)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in again]
    assert len(set(texts)) == 2
    streamed = ["", ""]
    for chunk in server.stream("completions", hot | {"prompt": PROMPT}):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    other = server.complete(PROMPT, **hot | {"seed": 12})["choices"]
    assert other[1]["text"] not in texts


def test_stop(server: Server) -> None:
    text = server.complete(PROMPT, **READABLE, temperature=1.5, seed=3)["choices"][0][
        "text"
    ]
    stop = text[30:33]
    cut = text.index(stop)
    wish = READABLE | {"temperature": 1.5, "seed": 3, "stop": [stop]}
    [choice] = server.complete(PROMPT, **wish)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[:cut], "stop")
    [kept] = server.complete(PROMPT, **wish, include_stop_str_in_output=True)["choices"]
    assert kept["text"] == text[: cut + 3]
    chunks = server.stream("completions", wish | {"prompt": PROMPT})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:cut]


def test_logprobs(server: Server) -> None:
    [choice] = server.complete(PROMPT, **READABLE, logprobs=3)["choices"]
    scored = choice["logprobs"]
    assert "".join(scored["tokens"]) == choice["text"]
    assert len(scored["token_logprobs"]) == len(scored["top_logprobs"]) == 80
    assert max(scored["token_logprobs"]) <= 0
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "temperature": 0}
    answer = server.post("chat/completions", body | READABLE).json()["choices"][0]
    entries = answer["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer["message"]["content"]
    assert {len(entry["top_logprobs"]) for entry in entries} <= {2, 3}


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"vllm_xargs": {"dllm_threshold": 1.5}},
        "dllm_threshold must be a number between",
    ),
    (
        {"vllm_xargs": {"dllm_block_length": 0}},
        "dllm_block_length must be a whole number",
    ),
    ({"vllm_xargs": {"dllm_block_length": 500}}, "dllm_block_length 500 is longer"),
    ({"vllm_xargs": {"dllm_speed": 9}}, "Unknown request argument 'dllm_speed'"),
    ({"vllm_xargs": {"dllm_policy": "factor"}}, "dllm_policy 'factor' has no meaning"),
    ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero"),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 3},
        "min_tokens 3 can contradict the grammar of structured_outputs",
    ),
    ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
    (
        {"use_beam_search": True, "n": 2},
        "use_beam_search is not supported by diffusion decoding",
    ),
    ({"prompt": [1, 300, 2]}, "The prompt contains the mask token (id 300)"),
    ({"prompt": "a <|mdm_mask|> b"}, "The prompt contains the mask token (id 300)"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": a_prompt(256)}, "256"),
    ({"prompt": a_prompt(300)}, "256"),
]


HALF = "\ud800"  # of a surrogate pair: JSON can say it, UTF-8 cannot
HALVES: list[dict[str, Any]] = [
    {"vllm_xargs": {"dllm_block_length": 24, "other": HALF}},
    {"vllm_xargs": {HALF: [HALF]}},
    {"vllm_xargs": {"dllm_policy": HALF}},
    {"kv_transfer_params": {"a": {HALF: 1}}},
    {"stop": [HALF]},
    {"bad_words": [HALF]},
    {"prompt": HALF},
    {"suffix": HALF},
    {"logit_bias": {HALF: 1}},
    {"diffusion": {HALF: 1}},
    {"top_k": 2**70},
]


@pytest.mark.parametrize("half", HALVES, ids=ascii)
def test_half_of_a_surrogate_pair_is_refused(
    server: Server, half: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3} | half
    headers = {"Content-Type": "application/json"}
    url, content = f"{server.url}/v1/completions", json.dumps(body)
    answer = httpx.post(url, content=content, headers=headers, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("given", ["", 0, [], "x"])
def test_what_is_no_object_is_refused(server: Server, given: Any) -> None:
    """An engine would look for keys in it."""
    body = {"prompt": PROMPT, "vllm_xargs": {"kv_transfer_params": given}}
    answer = server.post("completions", body)
    assert answer.status_code == 400
    assert "kv_transfer_params must be those of the server" in answer.text


def test_wrong_requests_while_neighbours_finish(server: Server) -> None:
    with ThreadPoolExecutor(len(MIXED)) as pool:
        neighbours = [pool.submit(ask, server, one) for one in MIXED]
        for options, sentence in WRONG:
            response = server.post(
                "completions", {"prompt": PROMPT, "max_tokens": 20} | options
            )
            assert response.status_code == 400, (options, response.text)
            assert sentence in response.json()["error"]["message"], options
        hole = [{"role": "user", "content": "a <|mdm_mask|> b"}]
        for body in (
            {"messages": MESSAGES, "vllm_xargs": {"dllm_steps": 2}},
            {"messages": hole},
        ):
            assert server.post("chat/completions", body).status_code == 400, body
        for one, neighbour in zip(MIXED, neighbours, strict=True):
            [choice] = neighbour.result()["choices"]
            assert choice["token_ids"] == one.expected("llada")[0]


def test_clients_that_go_away(server: Server) -> None:
    """Their requests end, their pages come back, and the server serves on."""

    def leave() -> None:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        next(
            server.stream(
                "completions", body | {"vllm_xargs": SMALL | {"dllm_threshold": 1.0}}
            )
        )

    threads = [threading.Thread(target=leave) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60
    while sum(server.metrics("vllm:num_requests_running").values()):
        assert time.monotonic() < deadline, "aborted requests still run"
        time.sleep(0.2)
    assert sum(server.metrics("vllm:kv_cache_usage_perc").values()) == 0
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    assert (
        ask(server, MIXED[0])["choices"][0]["token_ids"]
        == MIXED[0].expected("llada")[0]
    )


def test_the_viewer_says_how_to_fill_gaps(server: Server) -> None:
    """Before anything is sent, and as an error: D2F cannot fill them."""
    command = "diffuplug serve --strategy dual_cache"
    with browsing() as chromium:
        for look in USED:
            for viewer in viewers(look, chromium, server):
                page = viewer.open().mode("gaps").page
                assert command in page.inner_text("#gaps-notice")
                page.fill("#prompt", "Omar has 7 + 48 = [MASK:2] pencils.")
                page.click("#run")
                viewer.wait("failed")
                assert command in viewer.problem() and viewer.asked == []
                viewer.check()
