"""Gaps over HTTP: the suffix of completions, the FIM route, and any gaps of a text."""

import time
from typing import Any

import httpx
import pytest
from engines import CHECKPOINTS
from infill_requests import (
    CHOSEN,
    FIM,
    GREEDY,
    LENGTHS,
    PARTS,
    PREFIX,
    SUFFIX,
    TEXT,
    by_template,
    post,
    stream,
)
from processes import INSIDE, serving
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny-llada")


@pytest.mark.parametrize("path", ["completions", "fim/completions"])
def test_a_suffix(client: httpx.Client, tokenizer: Any, path: str) -> None:
    """The text in front of a suffix, whole and streamed; the suffix counts as prompt."""
    prompt, tail = (
        tokenizer.encode(PREFIX),
        tokenizer.encode(SUFFIX, add_special_tokens=False),
    )
    wanted = by_template(client, prompt, [-1] * 12 + tail)["choices"][0]["text"]
    reply = post(client, path, FIM)
    [choice] = reply["choices"]
    assert choice["text"] == wanted and choice["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(prompt) + len(tail)
    assert reply["usage"]["completion_tokens"] == 12 == choice["diffusion"]["tokens"]
    chunks = stream(client, path, FIM)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == wanted
    of_fim = path != "completions"
    assert ("message" in choice) == of_fim == ("delta" in chunks[0]["choices"][0])
    if of_fim:
        assert choice["message"] == {"role": "assistant", "content": wanted}
        assert all(
            c["choices"][0]["delta"]["content"] == c["choices"][0]["text"]
            for c in chunks
        )
    other = post(client, path, FIM | {"suffix": "!!\n"})["choices"][0]["text"]
    assert other != wanted, "the suffix is seen"
    short = post(client, path, FIM | {"diffusion": {"lengths": 5}})
    assert short["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", ["completions", "fim/completions"])
def test_without_a_suffix(client: httpx.Client, path: str) -> None:
    """An ordinary completion, also where the suffix is empty."""
    body = GREEDY | {"prompt": PREFIX, "max_tokens": 12}
    wanted = post(client, "completions", body)["choices"][0]["text"]
    for more in ({}, {"suffix": ""}):
        assert post(client, path, body | more)["choices"][0]["text"] == wanted


def test_what_clients_of_fim_send(client: httpx.Client, tokenizer: Any) -> None:
    """Mistral's `random_seed`, and penalties, which may be neutral."""
    hot = FIM | {"temperature": 1.0}
    seeded = [
        post(client, "fim/completions", hot | {"random_seed": i}) for i in (1, 1, 2)
    ]
    texts = [reply["choices"][0]["message"]["content"] for reply in seeded]
    assert texts[0] == texts[1] != texts[2]
    assert (
        post(client, "fim/completions", hot | {"seed": 1})["choices"][0]["text"]
        == texts[0]
    )
    editor = CHOSEN | {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_p": 1,
        "stop": ["\n\n"],
    }
    assert stream(client, "fim/completions", editor)
    penalty = {"presence_penalty": 1.5}
    tail = tokenizer.encode(SUFFIX, add_special_tokens=False)
    template = [-1] * 12 + tail
    whole = by_template(client, tokenizer.encode(PREFIX), template, **penalty)
    text = post(client, "fim/completions", FIM | penalty)["choices"][0]["text"]
    assert text == whole["choices"][0]["text"]
    assert text != post(client, "fim/completions", FIM)["choices"][0]["text"]


def test_nothing_before_the_gap(client: httpx.Client, tokenizer: Any) -> None:
    """The token that begins texts stands there, on all routes."""
    begin = [tokenizer.bos_token_id or tokenizer.eos_token_id]
    tail = tokenizer.encode(" pencils", add_special_tokens=False)
    wanted = by_template(client, begin, [-1] * 3 + tail)["choices"][0]["text"]
    body = GREEDY | {"prompt": "", "suffix": " pencils", "max_tokens": 3}
    body |= {"diffusion": {"lengths": 3}}
    for path in ("completions", "fim/completions"):
        assert post(client, path, body)["choices"][0]["text"] == wanted
    body = {"model": "tiny", "temperature": 0, "text": "[MASK:3] pencils"}
    [choice] = post(client, "infill", body)["choices"]
    assert choice["text"].endswith(" pencils") and choice["gaps"][0]["tokens"] <= 3


def test_nulls_are_absent(client: httpx.Client) -> None:
    """Editors send null for fields that they leave open."""
    wanted = post(client, "fim/completions", FIM)["choices"][0]["text"]
    nulls = {
        name: None for name in ("n", "echo", "stop", "seed", "random_seed", "top_p")
    }
    nulls |= {name: None for name in ("presence_penalty", "min_tokens", "ignore_eos")}
    reply = post(client, "fim/completions", FIM | nulls)
    assert reply["choices"][0]["text"] == wanted


@pytest.mark.parametrize("path", ["completions", "fim/completions"])
def test_as_many_stop_strings_as_editors_send(client: httpx.Client, path: str) -> None:
    stops = [f"<stop {i}>" for i in range(32)]
    assert post(client, path, FIM | {"stop": stops})["choices"]


@pytest.mark.parametrize("value", ["x", 5, [1], True])
@pytest.mark.parametrize(
    "path",
    [
        "completions",
        "chat/completions",
        "fim/completions",
        "completions/render",
        "responses",
    ],
)
def test_objects_are_objects(client: httpx.Client, path: str, value: Any) -> None:
    """vLLM's own validator fails on them, with status 500."""
    chat = {"messages": [{"role": "user", "content": "x"}]}
    given = {"prompt": "x", "input": "x"}
    body = GREEDY | (chat if path.startswith("chat") else given)
    reply = client.post(f"/v1/{path}", json=body | {"structured_outputs": value})
    assert reply.status_code == 400
    assert "structured_outputs must be an object" in reply.text


def test_gaps_of_a_text(client: httpx.Client, tokenizer: Any) -> None:
    """What each gap got, and the whole text; parts say the same."""
    prompt = tokenizer.encode("The capital of ")
    middle = tokenizer.encode(" is ", add_special_tokens=False)
    tail = tokenizer.encode(".", add_special_tokens=False)
    template = [-1] * 3 + middle + [-1] * 8 + tail
    wanted = by_template(client, prompt, template, logprobs=1)["choices"][0]
    reply = post(client, "infill", {"model": "tiny", "temperature": 0, "text": TEXT})
    [choice] = reply["choices"]
    ends = {tokenizer.eos_token_id, 312}
    spans = [(0, 3), (3 + len(middle), 11 + len(middle))]
    for gap, (start, stop) in zip(choice["gaps"], spans, strict=True):
        tokens = wanted["token_ids"][start:stop]
        cut = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        assert gap["tokens"] == cut
        assert gap["text"] == tokenizer.decode(tokens[:cut], skip_special_tokens=True)
        scores = wanted["logprobs"]["token_logprobs"][start : start + cut]
        assert gap["logprob"] == pytest.approx(sum(scores) / cut) if cut else None
    first, second = (gap["text"] for gap in choice["gaps"])
    assert choice["text"] == f"The capital of {first} is {second}."
    given = len(prompt) + len(middle) + len(tail)
    usage = {
        "prompt_tokens": given,
        "completion_tokens": 11,
        "total_tokens": given + 11,
    }
    assert (reply["object"], reply["usage"]) == ("infill", usage)
    assert reply["id"].startswith("infill-") and choice["diffusion"]["forwards"] >= 1
    same = post(client, "infill", {"model": "tiny", "temperature": 0, "parts": PARTS})
    assert same["choices"] == reply["choices"]
    hot = {"model": "tiny", "text": TEXT, "temperature": 1.5, "seed": 3, "n": 2}
    assert (
        len({choice["text"] for choice in post(client, "infill", hot)["choices"]}) == 2
    )


def test_an_answer_after_messages(client: httpx.Client, tokenizer: Any) -> None:
    """The parts are the assistant's turn."""
    messages = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    tail = tokenizer.encode(" since", add_special_tokens=False)
    wanted = by_template(client, prompt, [-1] * 4 + tail)["choices"][0]["text"]
    body = GREEDY | {"messages": messages, "parts": [{"mask": 4}, " since"]}
    assert post(client, "infill", body)["choices"][0]["text"] == wanted + " since"


def test_a_draft_is_rewritten(client: httpx.Client, tokenizer: Any) -> None:
    """A gap has as many positions as the piece had tokens, and `slack` more."""
    draft = "The sky is green today."
    length = len(tokenizer.encode("green", add_special_tokens=False))
    body = GREEDY | {"draft": draft, "rewrite": [[11, 16]], "slack": 2}
    reply = post(client, "infill", body)
    assert reply["usage"]["completion_tokens"] == length + 2
    parts = ["The sky is ", {"mask": length + 2}, " today."]
    same = post(client, "infill", GREEDY | {"parts": parts})
    assert reply["choices"] == same["choices"]


def test_one_gap_streams(client: httpx.Client, tokenizer: Any) -> None:
    """Of whole characters, since a stream holds the bytes of others back."""
    words = tokenizer.encode("blue and so very bright", add_special_tokens=False)
    body = GREEDY | {"text": "The sky is [MASK:9] today.", "allowed_token_ids": words}
    [gap] = post(client, "infill", body)["choices"][0]["gaps"]
    chunks = stream(client, "infill", body)
    assert {chunk["object"] for chunk in chunks} == {"infill"}
    assert (
        "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == gap["text"]
    )


def test_a_stop_string_ends_the_fill(client: httpx.Client, tokenizer: Any) -> None:
    """As in completions: it is cut, or kept where that is asked for."""
    words = tokenizer.encode("blue and so very bright", add_special_tokens=False)
    body = GREEDY | {"text": "The sky is [MASK:9] today.", "allowed_token_ids": words}
    whole = post(client, "infill", body)["choices"][0]["gaps"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    before = whole[: whole.index(stop)]
    for keeps, wanted in ((False, before), (True, before + stop)):
        asked = body | {"stop": [stop], "include_stop_str_in_output": keeps}
        [choice] = post(client, "infill", asked)["choices"]
        assert choice["gaps"][0]["text"] == wanted
        assert choice["text"] == f"The sky is {wanted} today."
        chunks = stream(client, "infill", asked)
        assert (
            "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == wanted
        )


def by_hand(
    client: httpx.Client, prompt: list[int], length: int, tail: list[int]
) -> Any:
    """A fill of one length, and its score by one more request."""
    filled = by_template(client, prompt, [-1] * length + tail, logprobs=0)["choices"][0]
    assert filled["token_ids"] and len(filled["token_ids"]) == length, (
        "no end token in there"
    )
    targets = {"dllm_template": [*filled["token_ids"], *[-1] * 4, *tail[4:]]}
    targets["dllm_targets"] = tail[:4]
    body = GREEDY | {"prompt": prompt, "max_tokens": length + 4, "logprobs": 0}
    scored = post(client, "completions", body | {"vllm_xargs": targets})["choices"][0]
    of_tail = scored["logprobs"]["token_logprobs"][length:]
    of_fill = filled["logprobs"]["token_logprobs"]
    return filled["text"], sum(of_tail) / 4 + sum(of_fill) / length


def test_lengths_are_tried_and_scored(client: httpx.Client, tokenizer: Any) -> None:
    """The best is the reply, as if it had been asked for alone; the scores of all are told."""
    prompt, tail = (
        tokenizer.encode(PREFIX),
        tokenizer.encode(SUFFIX, add_special_tokens=False),
    )
    wanted = [by_hand(client, prompt, length, tail) for length in LENGTHS]
    best = max(range(3), key=lambda i: wanted[i][1])
    body = CHOSEN | {"diffusion": {"lengths": LENGTHS}}
    reply = post(client, "completions", body)
    [choice] = reply["choices"]
    scores = choice["diffusion"].pop("lengths")
    assert [one["length"] for one in scores] == LENGTHS
    for one, (_, score) in zip(scores, wanted, strict=True):
        assert one["score"] == pytest.approx(score, abs=1e-4)
    assert choice["text"] == wanted[best][0]
    alone = post(
        client, "completions", CHOSEN | {"diffusion": {"lengths": LENGTHS[best]}}
    )
    assert choice == alone["choices"][0]
    assert reply["usage"] == alone["usage"]
    took, least = reply["metrics"]["diffusion"], alone["metrics"]["diffusion"]
    assert took["forwards"] >= least["forwards"] + 2 + 3, (
        "other lengths, and a pass for each"
    )
    chunks = stream(
        client, "fim/completions", body | {"stream_options": {"include_usage": True}}
    )
    assert [c["text"] for chunk in chunks for c in chunk["choices"]] == [
        wanted[best][0]
    ]
    assert chunks[0]["choices"][0]["delta"]["content"] == wanted[best][0]
    assert chunks[0]["choices"][0]["diffusion"]["lengths"] == scores
    assert (
        chunks[-1]["usage"] == reply["usage"]
        and chunks[-1]["metrics"] == reply["metrics"]
    )


def test_lengths_of_several_gaps(client: httpx.Client) -> None:
    """Each combination; the reply is that of the best, and has its gaps."""
    body = GREEDY | {
        "parts": ["The sky is ", {"mask": [2, 4]}, " and ", {"mask": [3, 5]}]
    }
    [choice] = post(client, "infill", body)["choices"]
    scores = choice["diffusion"].pop("lengths")
    assert [one["length"] for one in scores] == [[2, 3], [2, 5], [4, 3], [4, 5]]
    first, second = max(scores, key=lambda one: one["score"])["length"]
    text = f"The sky is [MASK:{first}] and [MASK:{second}]"
    assert post(client, "infill", GREEDY | {"text": text})["choices"] == [choice]
    of_gaps = [
        gap["logprob"] * gap["tokens"] for gap in choice["gaps"] if gap["tokens"]
    ]
    tokens = sum(gap["tokens"] for gap in choice["gaps"])
    best = max(one["score"] for one in scores)
    assert best == pytest.approx(sum(of_gaps) / tokens, abs=1e-6), (
        "no tail: the fill alone"
    )
    [any_length] = post(client, "infill", GREEDY | {"text": "The sky is [MASK:auto]!"})[
        "choices"
    ]
    lengths = [one["length"] for one in any_length["diffusion"]["lengths"]]
    assert lengths == [4, 8, 16, 32, 64, 128]
    longer = GREEDY | {"text": "The sky is [MASK:auto]!", "min_tokens": 33}
    [choice] = post(client, "infill", longer)["choices"]
    assert [one["length"] for one in choice["diffusion"]["lengths"]] == [64, 128]


RUNNING = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
STEPS = ("vllm:diffusion_num_denoising_steps_total{",)


def total(client: httpx.Client, names: tuple[str, ...]) -> float:
    """Return the sum of the server's metrics whose lines begin so."""
    lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)
    )


def test_a_reader_that_leaves_ends_all_lengths(client: httpx.Client) -> None:
    """Sixteen of them, of as many forwards as positions."""
    body = CHOSEN | {"max_tokens": 200, "diffusion": {"lengths": list(range(185, 201))}}
    body["vllm_xargs"] = {"dllm_policy": "low_confidence", "dllm_steps": 200}
    before = total(client, STEPS)
    with pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=body, timeout=0.3)
    deadline = time.monotonic() + 60
    while total(client, RUNNING):
        assert time.monotonic() < deadline, "its requests still run"
        time.sleep(0.1)
    assert total(client, STEPS) - before < 16 * 200 / 2


def test_a_key_is_needed(client: httpx.Client) -> None:
    for path in ("fim/completions", "infill"):
        reply = client.post(
            f"/v1/{path}", json=FIM, headers={"Authorization": "Bearer wrong"}
        )
        assert reply.status_code == 401


def test_templates_over_http(client: httpx.Client) -> None:
    """A hostile one is a 400 with one sentence, and the server goes on."""
    body = GREEDY | {"prompt": PREFIX, "max_tokens": 2}
    for template in ([-1] * 10**6, [-1, -2], [1.5, -1], ["x", -1], [-1, -1, 10**6], 7):
        reply = client.post(
            "/v1/completions", json=body | {"vllm_xargs": {"dllm_template": template}}
        )
        assert reply.status_code == 400, reply.text
        assert (
            reply.json()["error"]["message"].count("dllm_template")
            or "positions" in reply.text
        )
    assert post(client, "completions", body)["choices"]


def test_without_our_endpoints(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM's own route says where a suffix is served."""
    log = tmp_path_factory.mktemp("plain") / "log"
    plugins = "register_dllm_models,register_omni,diffuplug"
    with serving(log, VLLM_PLUGINS=plugins, **INSIDE) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=FIM, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "suffix is served by the endpoints of DiffuPlug: use diffuplug serve, or name "
        "diffuplug_api in VLLM_PLUGINS."
    )
