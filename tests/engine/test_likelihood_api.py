"""POST /v1/likelihood: what LLaDA's estimate and chain rules make of plain torch's forwards."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import CHECKPOINTS, a_prompt, letters
from processes import INSIDE, PROXY, serving
from test_targets import plain_logprobs

from dllm_plugin.api.likelihood import METHODS, estimate
from dllm_plugin.reference.model import PlainModel

PAIRS = [
    {"context": a_prompt(20, 1), "continuation": a_prompt(7, 2)},
    {"context": a_prompt(9, 3), "continuation": [65]},
    {"context": letters(12, 1), "continuation": letters(12, 3)},
]
TEXT = {"context": "How many pencils are left? ", "continuation": "There are 29."}


@pytest.fixture(scope="module")
def model() -> PlainModel:
    return PlainModel.load(CHECKPOINTS / "tiny-llada")


def ask(
    client: httpx.Client, path: str = "/v1/likelihood", **body: Any
) -> dict[str, Any]:
    reply = client.post(path, json={"model": "tiny"} | body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def expected(model: PlainModel, pair: dict[str, Any], method: str, *drawn: int) -> Any:
    context, text = pair["context"], pair["continuation"]
    samples = METHODS[method](len(text), *(drawn or (0, 0)))
    scored = [plain_logprobs(model, context, text, one.masked) for one in samples]
    return estimate(method, samples, scored), len(samples)


@pytest.mark.parametrize("method", METHODS)
def test_estimates_of_plain_torch(
    client: httpx.Client, model: PlainModel, method: str
) -> None:
    drawn = {"samples": 24, "seed": 5} if method == "monte_carlo" else {}
    told = ask(client, pairs=PAIRS, method=method, **drawn)
    forwards = 0
    for pair, result in zip(PAIRS, told["results"], strict=True):
        found, count = expected(model, pair, method, *drawn.values())
        assert result["logprob"] == pytest.approx(found.logprob, abs=1e-3)
        error = found.standard_error
        assert result["standard_error"] == (error and pytest.approx(error, abs=1e-3))
        assert (result["samples"], result["tokens"]) == (
            count,
            len(pair["continuation"]),
        )
        assert result["greedy"] is None
        forwards += count
    positions = sum(len(pair["context"] + pair["continuation"]) for pair in PAIRS)
    usage = {
        "prompt_tokens": positions,
        "completion_tokens": 0,
        "total_tokens": positions,
    }
    assert (
        told["usage"] == usage
        and told["object"] == "likelihood"
        and told["model"] == "tiny"
    )
    assert told["metrics"]["diffusion"]["forwards"] == forwards
    assert told["id"].startswith("likelihood-")


def test_texts_are_cut_where_the_context_ends(client: httpx.Client) -> None:
    """A space at the end of a context belongs to the word behind it."""
    whole = tokens(client, TEXT["context"] + TEXT["continuation"])
    before = tokens(client, TEXT["context"].rstrip())
    ids = {"context": before, "continuation": whole[len(before) :]}
    told = ask(client, pairs=[TEXT, ids], method="pseudo")["results"]
    assert told[0] == told[1] and told[0]["tokens"] == len(whole) - len(before)
    moved = {
        "context": TEXT["context"].rstrip(),
        "continuation": " " + TEXT["continuation"],
    }
    assert ask(client, pairs=[moved], method="pseudo")["results"] == told[:1]


def test_a_text_without_context(client: httpx.Client) -> None:
    """It stands behind the token that begins or ends texts."""
    text = TEXT["continuation"]
    card = json.loads(
        (CHECKPOINTS / "tiny-llada" / "tokenizer_config.json").read_text()
    )
    [first] = tokens(client, card.get("bos_token") or card["eos_token"])
    ids = {"context": [first], "continuation": tokens(client, text)}
    told = ask(client, pairs=[{"continuation": text}, ids], method="left_to_right")[
        "results"
    ]
    assert told[0] == told[1]


def tokens(client: httpx.Client, text: str) -> list[int]:
    reply = client.post("/tokenize", json={"model": "tiny", "prompt": text})
    return list(reply.json()["tokens"])


def test_greedy(client: httpx.Client) -> None:
    """Whether one token a forward, the surest first, writes the continuation."""
    context = PAIRS[0]["context"]
    body = {"model": "tiny", "prompt": context, "max_tokens": 8, "temperature": 0}
    decode = {
        "dllm_template": [-1] * 8,
        "dllm_policy": "low_confidence",
        "dllm_steps": 8,
    }
    body |= {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": decode}
    written = client.post("/v1/completions", json=body).json()["choices"][0][
        "token_ids"
    ]
    other = [*written[:-1], written[-1] - 1]
    pairs = [{"context": context, "continuation": text} for text in (written, other)]
    told = ask(client, pairs=pairs, method="pseudo", greedy=True)
    assert [result["greedy"] for result in told["results"]] == [True, False]
    assert told["metrics"]["diffusion"]["forwards"] == 4 * 8


def test_the_same_seed_says_the_same(client: httpx.Client) -> None:
    one, again, other = (
        ask(client, pairs=PAIRS[:1], samples=8, seed=seed)["results"]
        for seed in (3, 3, 4)
    )
    assert one == again != other


ONE = {"context": [5], "continuation": [6]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pairs": []}, "pairs must hold at least one pair"),
    (
        {"pairs": [{"context": "a", "continuation": ""}]},
        "pairs[0].continuation holds no token.",
    ),
    (
        {"pairs": [{"context": "a", "continuation": [5]}]},
        "pairs[0] mixes text and token ids",
    ),
    (
        {"pairs": [ONE], "method": "beam"},
        "method must be one of monte_carlo, pseudo, left_to_",
    ),
    ({"pairs": [ONE], "samples": 0}, "samples must be from 1 to 1024, got 0."),
    ({"pairs": [ONE], "samples": 1025}, "samples must be from 1 to 1024, got 1025."),
    (
        {"pairs": [ONE], "seed": -1},
        "seed must be from 0 to 9223372036854775807, got -1.",
    ),
    (
        {"pairs": [ONE], "method": "pseudo", "seed": 1},
        "seed has no effect with method pseudo",
    ),
    (
        {"pairs": [{"context": [5], "continuation": [6, 7]}] * 8, "samples": 1024},
        "This call needs 8192 forwards, at most 4096 are allowed: fewer samples or pairs.",
    ),
    (
        {"pairs": [ONE] * 5000},
        "This call needs 5000 forwards, at most 4096 are allowed",
    ),
    (
        {"pairs": [{"context": [5], "continuation": [300]}]},
        "dllm_targets holds the mask token",
    ),
    (
        {"pairs": [{"context": [300], "continuation": [5]}]},
        "The prompt contains the mask token",
    ),
    (
        {"pairs": [{"context": [5], "continuation": [10**9]}]},
        "but the vocabulary has 320 tokens",
    ),
    (
        {"pairs": [{"context": [5] * 300, "continuation": [6]}]},
        "contains 300 input tokens",
    ),
    (
        {"pairs": [{"context": [5], "continuation": [6] * 10**6}]},
        "1000000 positions, canvas_leng",
    ),
    ({"pairs": [ONE], "model": "other"}, "The model `other` does not exist."),
    ({"pairs": [ONE], "temperature": 1}, "temperature"),
    ({"pairs": [ONE], "samples": True}, "samples"),
]


@pytest.mark.parametrize("body,sentence", WRONG, ids=lambda value: str(value)[:40])
def test_refused_by_name(
    client: httpx.Client, body: dict[str, Any], sentence: str
) -> None:
    reply = client.post("/v1/likelihood", json={"model": "tiny"} | body)
    assert (
        reply.status_code in (400, 404) and sentence in reply.json()["error"]["message"]
    )


def test_scores_of_a_prompt_name_the_way(client: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "prompt": "ab",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    }
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert "use /v1/likelihood or examples/lm_eval_model.py." in reply.text


def test_the_key_guards_and_the_path_in_front_is_taken_off(
    client: httpx.Client,
) -> None:
    body = {"model": "tiny", "pairs": [ONE], "method": "pseudo"}
    assert httpx.post(f"{client.base_url}/v1/likelihood", json=body).status_code == 401
    ask(client, f"{PROXY}/v1/likelihood", pairs=[ONE], method="pseudo")


def test_a_reader_that_leaves_ends_its_forwards(client: httpx.Client) -> None:
    """A call of thousands is queued here, so others are answered while it runs."""
    pairs = [{"context": [5], "continuation": [6] * 32}] * 4
    body = json.dumps({"model": "tiny", "pairs": pairs, "samples": 1024})
    lines = [
        "POST /v1/likelihood HTTP/1.1",
        *(f"{name}: {value}" for name, value in client.headers.items()),
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    before, url = total(client, FINISHED), client.base_url
    with socket.create_connection((url.host, url.port)) as reader:
        reader.sendall("\r\n".join([*lines, "", body]).encode())
        wait_until(lambda: total(client, FINISHED) > before)
        ask(client, pairs=[ONE], method="pseudo")
        assert total(client, FINISHED) - before < 4096
    wait_until(lambda: total(client, *RUNNING) == 0)
    assert total(client, FINISHED) - before < 4096


FINISHED = "diffuplug:request_forwards_count{"
RUNNING = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")


def total(client: httpx.Client, *names: str) -> float:
    """Sum of metrics."""
    lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition, a minute at most."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_refused_if_blocks_see_nothing_after_them(tmp_path: Path) -> None:
    """Gaps as likelihoods, by the words of the specification."""
    options = '{"dllm": {"strategy": "d2f"}}'
    fim = {"prompt": "a", "suffix": "b"}
    option = f"--additional-config={options}"
    with serving(tmp_path / "log", option, **INSIDE) as server:
        for path, wanted, body in (
            ("likelihood", "likelihood", {"pairs": [ONE]}),
            ("completions", "suffix", fim),
            ("fim/completions", "suffix", fim),
            ("infill", "infill", {"text": "a[MASK:2]b"}),
        ):
            reply = server.post(path, body)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"] == (
                f"{wanted} needs full attention: under strategy 'd2f' a block never sees what "
                "comes after it. Use strategy dual_cache, prefix_cache or "
                "semi_autoregressive."
            )
