"""Our endpoints over HTTP: what a request took, in replies, streams and on /metrics."""

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_requests import (
    BODY,
    CHAT,
    COMPLETION,
    MESSAGES,
    PROMPT,
    SMALL,
    metrics,
    post,
    settled,
    stream,
)
from engines import CHECKPOINTS
from processes import KEY, PROXY
from transformers import AutoTokenizer

from dllm_plugin.commands import cli, parsers, watch

COUNTS = ("forwards", "tokens", "computed_positions", "wasted_positions")
HISTOGRAMS = (
    "request_forwards",
    "request_tokens_per_forward",
    "request_positions_per_token",
)


def check_counts(
    whole: dict[str, Any], choices: list[dict[str, Any]], prompt: int
) -> None:
    for counts in choices:
        assert counts["tokens"] == 48 and 6 <= counts["forwards"] <= 48
        # Each forward computes a block at least; block by block, prompt and canvas once more.
        assert counts["computed_positions"] >= 8 * counts["forwards"] + 6 * prompt
        waste = counts["computed_positions"] - prompt - counts["tokens"]
        assert counts["wasted_positions"] == waste
        assert counts["tokens_per_forward"] == round(48 / counts["forwards"], 2)
    for name in COUNTS:
        assert whole[name] == sum(counts[name] for counts in choices)
    assert (whole["strategy"], whole["policy"]) == ("dual_cache", "threshold")


@pytest.mark.parametrize(
    "path,prompt", [("chat/completions", CHAT), ("completions", COMPLETION)]
)
def test_counts_of_each_choice(client: httpx.Client, path: str, prompt: Any) -> None:
    """The same in a reply and in a stream, and the same text as without."""
    hot = prompt | {"n": 2, "temperature": 1.5, "seed": 7}
    plain = post(client, path, **hot)
    whole = post(client, path, **hot, diffusion={})
    length = whole["usage"]["prompt_tokens"]
    counts = [choice.pop("diffusion") for choice in whole["choices"]]
    assert whole["choices"] == plain["choices"] and whole["usage"] == plain["usage"]
    check_counts(whole["metrics"]["diffusion"], counts, length)
    assert list(whole["metrics"]) == ["diffusion"]
    chunks = stream(client, path, **hot, diffusion={})
    told = {
        c["index"]: c["diffusion"]
        for k in chunks
        for c in k["choices"]
        if "diffusion" in c
    }
    ends = {c["index"] for k in chunks for c in k["choices"] if c["finish_reason"]}
    assert ends == {0, 1} and [told[0], told[1]] == counts
    assert chunks[-1]["metrics"]["diffusion"] == whole["metrics"]["diffusion"]
    untouched = stream(client, path, **hot)
    assert [chunk for chunk in untouched if "diffusion" in json.dumps(chunk)] == []


def test_several_prompts_in_one_body(client: httpx.Client) -> None:
    body = {"prompt": [PROMPT, PROMPT[:12]], "n": 2, "temperature": 1.5, "seed": 7}
    whole = post(client, "completions", **body, diffusion={})
    counts = [choice["diffusion"] for choice in whole["choices"]]
    single = post(client, "completions", **body | {"prompt": PROMPT[:12]}, diffusion={})
    assert counts[2:] == [choice["diffusion"] for choice in single["choices"]]


def test_no_statistics_unless_asked_for(client: httpx.Client) -> None:
    """Hundreds of zeros in every reply say nothing."""
    assert post(client, "completions", **COMPLETION)["metrics"] is None
    assert "metrics" not in stream(client, "chat/completions", **CHAT)[-1]
    told = post(
        client, "completions", **COMPLETION, vllm_xargs=SMALL | {"dllm_statistics": 1}
    )
    statistics = told["metrics"]["speculative_decoding"]
    asked = post(client, "completions", **COMPLETION, diffusion={})["metrics"][
        "diffusion"
    ]
    assert statistics["num_spec_steps"] == asked["forwards"]
    assert statistics["num_draft_tokens"] == asked["computed_positions"]


@pytest.mark.parametrize("stop", [None, ["has"]])
def test_prompts_that_end_amid_a_character(
    client: httpx.Client, stop: list[str] | None
) -> None:
    """The reply begins with that character, and stop strings do not look at the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny-llada")
    [letter] = tokenizer.encode("x", add_special_tokens=False)
    before = tokenizer.encode("Anna has 48 ", add_special_tokens=False)
    peppers = tokenizer.encode("\N{HOT PEPPER}", add_special_tokens=False)
    assert len(peppers) == 4
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    body |= {"stop": stop, "n": 1, "allowed_token_ids": [letter]}
    for cut in range(5):
        body["prompt"] = [*before, *peppers[:cut]]
        reply = client.post("/v1/completions", json=body).json()
        [choice] = reply["choices"]
        broken = "\N{REPLACEMENT CHARACTER}" if 0 < cut < 4 else ""
        assert choice["text"].lstrip(broken or " ") == "xxx", choice
        assert choice["text"].count("\N{REPLACEMENT CHARACTER}") <= cut
        assert choice["finish_reason"] == "length"
        texts = []
        for line in client.post(
            "/v1/completions", json=body | {"stream": True}
        ).iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        assert "".join(texts) == choice["text"]
    body |= {"prompt": [*before, *peppers[:3]], "allowed_token_ids": peppers[3:]}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"].startswith("\N{HOT PEPPER}")


def test_a_stop_string_ends_the_counting(client: httpx.Client) -> None:
    text = post(client, "completions", **COMPLETION, temperature=1.5, seed=3)[
        "choices"
    ][0]["text"]
    wish = COMPLETION | {"temperature": 1.5, "seed": 3, "stop": [text[20:23]]}
    whole = post(client, "completions", **wish, diffusion={})
    assert whole["choices"][0]["finish_reason"] == "stop"
    counts = whole["choices"][0]["diffusion"]
    assert 0 < counts["tokens"] == whole["usage"]["completion_tokens"] < 48
    assert 3 <= counts["forwards"] < 48


def test_histograms_count_every_request_once(client: httpx.Client) -> None:
    before, names = metrics(client), [f"diffuplug:{name}_count" for name in HISTOGRAMS]
    time.sleep(0.5)
    while (now := metrics(client))[names[0]] > before[names[0]]:  # of the tests before
        before = now
        time.sleep(0.5)
    whole = post(client, "completions", **COMPLETION, diffusion={})["metrics"][
        "diffusion"
    ]
    post(client, "chat/completions", **CHAT)
    stream(client, "completions", **COMPLETION)
    wish = {"temperature": 1.5, "seed": 3, "stop": ["a", "b", "c", "d"]}
    post(client, "completions", **COMPLETION | wish)
    deadline = time.monotonic() + 60
    while (
        metrics(client)[names[0]] - before[names[0]] < 4 and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    after = metrics(client)
    assert [after[name] - before[name] for name in names] == [4, 4, 4]
    name = "diffuplug:request_forwards_sum"
    steps = "vllm:diffusion_num_denoising_steps_total"
    assert (
        after[name] - before[name] == after[steps] - before[steps] >= whole["forwards"]
    )


def test_board_and_alerts_name_metrics_that_exist(client: httpx.Client) -> None:
    """Every metric of the files in deploy/ is on /metrics."""
    deploy = Path(__file__).parents[2] / "deploy"
    text = (deploy / "grafana" / "board.json").read_text(encoding="utf-8")
    text += (deploy / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:(?:vllm|diffuplug):|http_)\w+", text))
    post(client, "completions", **COMPLETION)
    assert len(named) >= 12 and named <= set(metrics(client))


WRONG: list[tuple[Any, str]] = [
    (
        {"frame": True},
        "Unknown field 'frame' in diffusion; known: early_text, frames, lengths, trace.",
    ),
    ({"frames": True}, 'diffusion.frames needs "stream": true.'),
    ({"early_text": True}, 'diffusion.early_text needs "stream": true.'),
    ({"frames": {"every": 0}}, "diffusion.frames.every must be at least 1, got 0."),
    ({"frames": 3}, "diffusion.frames must be true, false or"),
    ({"trace": 1}, "diffusion.trace must be true or false, got 1."),
    (True, "diffusion must be an object, got True."),
]


@pytest.mark.parametrize("field,sentence", WRONG)
def test_refused_by_name(client: httpx.Client, field: Any, sentence: str) -> None:
    for path, prompt in (("chat/completions", CHAT), ("completions", COMPLETION)):
        reply = client.post(f"/v1/{path}", json=BODY | prompt | {"diffusion": field})
        assert reply.status_code == 400 and sentence in reply.json()["error"]["message"]
    wrong = BODY | COMPLETION | {"diffusion": {}, "vllm_xargs": {"dllm_threshold": 2}}
    reply = client.post("/v1/completions", json=wrong)
    assert reply.status_code == 400 and "dllm_threshold must be" in reply.text


def test_the_key_guards_and_the_path_in_front_is_taken_off(
    client: httpx.Client,
) -> None:
    body = BODY | COMPLETION | {"diffusion": {}}
    reply = httpx.post(f"{client.base_url}/v1/completions", json=body)
    assert reply.status_code == 401
    reply = client.post(f"{PROXY}/v1/completions", json=body)
    assert reply.status_code == 200 and "diffusion" in reply.json()["metrics"]


@pytest.mark.parametrize(
    "asked", [{}, {"frames": True, "early_text": True, "trace": True}]
)
def test_a_reader_that_leaves_frees_the_request(
    client: httpx.Client, asked: dict[str, Any]
) -> None:
    slow = BODY | COMPLETION | {"max_tokens": 200, "stream": True, "diffusion": asked}
    slow["vllm_xargs"] = SMALL | {"dllm_threshold": 1.0}
    with client.stream("POST", "/v1/completions", json=slow) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 60
    while metrics(client)["vllm:num_requests_running"]:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.2)


def test_aborted_streams_are_counted_apart(client: httpx.Client) -> None:
    """A stop string, at which vLLM's front end aborts the request too, is no abort.

    A busy server may finish a few texts before it sees that their readers have gone.
    """
    text = post(client, "completions", **COMPLETION)["choices"][0]["text"]
    before, left = settled(client), 30
    slow = BODY | COMPLETION | {"max_tokens": 250, "stream": True}
    slow["vllm_xargs"] = SMALL | {"dllm_threshold": 1.0}
    for _ in range(left):
        with client.stream("POST", "/v1/completions", json=slow) as reply:
            assert reply.status_code == 200
            next(reply.iter_lines())
    early: dict[str, Any] = {"frames": True, "early_text": True}
    # At the last one the engine has ended the request before it hears of it.
    stops = [(text[20:23], {}), (text[20:23], early), (text[-11:], {})]
    for stop, asked in stops:
        stopped = {"stop": [stop], "diffusion": asked}
        chunks = stream(client, "completions", **COMPLETION | stopped)
        reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
        assert reasons[-1] == "stop"
    unheeded = {"stop": [text[:8]], "min_tokens": 40}
    whole = post(client, "completions", **COMPLETION | unheeded)["choices"][0]
    assert whole["finish_reason"] == "length" and text[:8] not in text[8:]
    deadline = time.monotonic() + 60
    more: dict[str, float] = {}
    while sum(more.values()) < left + len(stops) + 1 and time.monotonic() < deadline:
        after = settled(client)
        more = {reason: after[reason] - before[reason] for reason in after}
    finished = more.pop("length") - 1
    assert 0 <= finished < left
    none = dict.fromkeys(("error", "repetition"), 0)
    assert more == none | {"abort": left - finished, "stop": len(stops)}


def test_the_viewer_needs_no_key(client: httpx.Client) -> None:
    """And it lies under the path in front too; it asks for the key itself."""
    for path in ("/viewer", f"{PROXY}/viewer"):
        reply = httpx.get(f"{client.base_url}{path}")
        assert (
            reply.status_code == 200
            and "sha256-" in reply.headers["content-security-policy"]
        )


def test_watch_in_a_terminal(
    client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """`diffuplug watch --url`: the answer as text where standard output is no terminal."""
    words = ["watch", "What is 2+2?", f"--url={client.base_url}", "--max-tokens=24"]
    words += ["--block-length=8", "--threshold=0.4"]
    assert cli.main([*words, f"--api-key={KEY}"]) == 0
    printed = capsys.readouterr()
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "model": "tiny"}
    plain = client.post(
        "/v1/chat/completions", json=body | {"vllm_xargs": SMALL}
    ).json()
    assert printed.out.strip() == plain["choices"][0]["message"]["content"].strip()
    tokens = plain["usage"]["completion_tokens"]
    assert re.fullmatch(rf"{tokens} tokens, \d+ forwards, .* seconds\n", printed.err)
    args = parsers.build_parser().parse_args([*words, f"--api-key={KEY}"])
    seen = [
        [entry is None for entry in state.canvas] for state in watch.from_server(args)
    ]
    assert any(
        True in masks[: masks[::-1].index(False)] for masks in seen if False in masks
    )
    assert cli.main([*words, "--api-key=wrong"]) == 2
    assert "Unauthorized" in capsys.readouterr().err
