"""New weights over HTTP, by the routes that vLLM opens for trainers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import weight_files
from engines import CHECKPOINTS, EngineRoom, generate, letters, params, token_ids
from processes import HERE, Server, serving
from safetensors.torch import load_file
from streams import Stream, slow_request
from trained_weights import trained

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

SDAR, PROMPT = CHECKPOINTS / "tiny-sdar", letters(100)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(SDAR, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        f'--weight-transfer-config={{"backend": "{weight_files.BACKEND}"}}',
        "--worker-extension-cls=weight_files.FromFiles",
        *("--block-size=32", "--enable-prefix-caching"),
    )
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(HERE)}
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, *options, model=SDAR, **variables) as server:
        yield server


def control(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/{route}", json=body, timeout=120)


def answer(server: Server) -> list[int]:
    options = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    [choice] = server.complete(PROMPT, **options)["choices"]
    return list(choice["token_ids"])


def update(
    server: Server, checkpoint: Path, *parts: list[str], version: str = ""
) -> None:
    """Pause, which ends what runs and forgets kept prefixes, then send, then resume."""
    file = str(checkpoint / "model.safetensors")
    assert control(server, "pause").status_code == 200
    assert control(server, "start_weight_update").status_code == 200
    for names in parts:
        info = {"file": file, "names": names}
        assert control(server, "update_weights", update_info=info).status_code == 200
    ended = control(server, "finish_weight_update", weight_version=version or None)
    assert control(server, "resume").status_code == 200
    assert ended.status_code == 200, ended.text


def test_a_trainer_sends_halves(server: Server, room: EngineRoom, new: Path) -> None:
    llm = room.start("sdar", {}, model=str(new))
    [wanted] = [token_ids(one) for one in generate(llm, [PROMPT], params(20))]
    names, before = sorted(load_file(new / "model.safetensors")), answer(server)
    assert before != wanted
    update(server, new, names[::2], names[1::2], version="step 7")
    assert answer(server) == wanted
    assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "step 7"}
    update(server, SDAR, names, version="step 0")
    assert answer(server) == before


def test_frozen_requests_go_on(server: Server) -> None:
    """Their pages are computed again, so that nobody finds those of old weights."""
    bodies = [slow_request(index, 120) for index in range(3)]
    wanted = [server.post("completions", body).json() for body in bodies]
    streams = [Stream(body) for body in bodies]
    for stream in streams:
        stream.start(server.url)
    for stream in streams:
        assert stream.started.wait(60)
    frozen = control(server, "pause?mode=keep")
    assert frozen.status_code == 200, frozen.text
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
    assert not any(stream.ended for stream in streams)
    assert control(server, "resume").status_code == 200
    for stream, whole in zip(streams, wanted, strict=True):
        stream.thread.join(120)
        assert stream.text == whole["choices"][0]["text"], stream.error


def test_half_an_update_is_an_error_and_the_server_answers(
    server: Server, new: Path
) -> None:
    names, before = sorted(load_file(new / "model.safetensors")), answer(server)
    with pytest.raises(AssertionError, match="The update has no weight"):
        update(server, new, names[::2])
    assert answer(server)
    assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "step 0"}
    update(server, SDAR, names)
    assert answer(server) == before


def test_a_wrong_way_to_pause_is_named(server: Server) -> None:
    refused = control(server, "pause?mode=never")
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message == "mode: Input should be 'abort', 'wait' or 'keep'."


def test_sleep_does_nothing_on_a_cpu(server: Server) -> None:
    before = answer(server)
    for level in (1, 2):
        assert (
            httpx.post(f"{server.url}/sleep?level={level}", timeout=60).status_code
            == 200
        )
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 503
        assert control(server, "wake_up").status_code == 200
        assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200
        assert answer(server) == before
    assert "sleep mode is not supported on CPU" in server.log.read_text()
