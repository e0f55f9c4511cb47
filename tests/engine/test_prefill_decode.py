"""Prompts are computed by one server and decoded by another one, as a router asks them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engines import CHECKPOINTS, letters
from processes import KILLED_SOON, Server, end, free_port, serving

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]
pytest.importorskip("nixl", reason="needs nixl")

MODELS = (
    *("sdar", "llada2.1", "fast-dllm-v2"),
    *("nemotron", "idlm", "wedlm", "a2d-qwen3"),
)
BLOCKS = ("--strategy", "block_diffusion")  # of A2D, which has another default
LENGTHS = (1, 3, 4, 9, 31, 32, 33, 64, 97, 200)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# What P decodes is dropped: one forward of one block, if its strategy reads `dllm_steps`.
ONE_FORWARD = {"vllm_xargs": {"dllm_steps": 1}}


def transfer(role: str) -> str:
    """Return the option that makes a server prefill or decode."""
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
    }
    return f"--kv-transfer-config={json.dumps(config)}"


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Return a server that prefills and a server that decodes."""
    logs = tmp_path_factory.mktemp("pair")
    folder = CHECKPOINTS / f"tiny-{model}"
    strategy = BLOCKS if model == "a2d-qwen3" else ()
    with (
        serving(
            logs / "prefill",
            transfer("kv_producer"),
            *strategy,
            model=folder,
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            **KILLED_SOON,
        ) as prefill,
        serving(
            logs / "decode",
            transfer("kv_consumer"),
            "--no-enable-prefix-caching",
            *strategy,
            model=folder,
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            **KILLED_SOON,
        ) as decode,
    ):
        yield prefill, decode


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def decode_alone(server: Server, length: int) -> list[int]:
    """Return the answer of a server that computes the prompt itself."""
    asked = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    return tokens(server.complete(letters(length, length), **asked))


def prefilled(server: Server, length: int, **asked: Any) -> dict[str, Any]:
    """Return where the pages of a prompt are after its prefill."""
    asked |= {"max_tokens": 1, "kv_transfer_params": PREFILL}
    answer = server.complete(letters(length, length), **asked)
    return dict(answer["kv_transfer_params"])


def test_answers_of_pulled_pages(pair: tuple[Server, Server], model: str) -> None:
    """Prompts end at every place within a block, and within a page."""
    prefill, decode = pair
    asked: dict[str, Any] = ONE_FORWARD if model == "sdar" else {}
    hits = "vllm:external_prefix_cache_hits_total"
    for length in LENGTHS:
        expected = decode_alone(decode, length)
        before = sum(decode.metrics(hits).values())
        answer = decode.complete(
            letters(length, length),
            max_tokens=40,
            ignore_eos=True,
            return_token_ids=True,
            kv_transfer_params=prefilled(prefill, length, **asked),
        )
        assert tokens(answer) == expected
        assert sum(decode.metrics(hits).values()) - before == length


def test_wrong_pages_are_refused(pair: tuple[Server, Server]) -> None:
    """They would end the engine that pulls them."""
    prefill, decode = pair
    given = prefilled(prefill, 9)
    wrong = [
        (given | {"remote_block_ids": "x"}, 9),
        ({"do_remote_prefill": True}, 9),
        ({"do_remote_decode": True} | given | {"do_remote_prefill": False}, 9),
        (given, 200),
    ]
    for pulled, length in wrong:
        body = {"prompt": letters(length, length), "kv_transfer_params": pulled}
        answer = decode.post("completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].endswith("kv_transfer_params")


def test_the_prefill_server_is_killed(pair: tuple[Server, Server]) -> None:
    """A request whose pages are lost ends with an error, others go on."""
    prefill, decode = pair
    expected = decode_alone(decode, 64)
    lost = prefilled(prefill, 64)
    end(prefill.process)
    body = {
        "prompt": letters(64, 64),
        "max_tokens": 40,
        "kv_transfer_params": lost,
    }
    assert decode.post("completions", body).status_code == 500
    assert decode_alone(decode, 64) == expected
