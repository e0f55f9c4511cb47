"""Adapters over HTTP: a request chooses one by model name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from engines import CHECKPOINTS, EngineRoom, generate, letters, params, token_ids
from processes import INSIDE, Server, serving
from trained_adapters import merged, write_adapter

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

SDAR, PROMPT, TARGETS = (
    CHECKPOINTS / "tiny-sdar",
    letters(20),
    ["q_proj", "v_proj", "up_proj"],
)
NAMES = ("tiny", "first", "second")  # the base's name comes first


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, SDAR, TARGETS, len(name))
        for name in NAMES[1:]
    }


@pytest.fixture(scope="module")
def server(
    adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    chosen = [f"{name}={path}" for name, path in adapters.items()]
    options = (
        "--enable-lora",
        "--max-loras=2",
        "--max-lora-rank=8",
        "--lora-modules",
        *chosen,
    )
    variables = INSIDE | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serving(log, *options, model=SDAR, **variables) as server:
        yield server


def answer(server: Server, model: str) -> list[int]:
    options = {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    [choice] = server.complete(PROMPT, model=model, **options)["choices"]
    return list(choice["token_ids"])


def test_names_choose_adapters_in_one_batch(
    server: Server, room: EngineRoom, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folders = [
        SDAR,
        *(merged(tmp_path / n / SDAR.name, SDAR, a) for n, a in adapters.items()),
    ]
    wanted = {}
    for name, folder in zip(NAMES, folders, strict=True):
        llm = room.start("sdar", {}, model=str(folder))
        [wanted[name]] = [token_ids(one) for one in generate(llm, [PROMPT], params(20))]
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3
    asked = NAMES * 4
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda name: answer(server, name), asked))
    assert found == [wanted[name] for name in asked]
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {model["id"] for model in listed} == set(NAMES)


def test_what_does_not_fit_is_refused_and_the_server_answers(
    server: Server, adapters: dict[str, Path], tmp_path: Path
) -> None:
    wrong = write_adapter(
        tmp_path / "wrong", SDAR, TARGETS, base_model_name_or_path="a/other"
    )
    refused = server.post(
        "load_lora_adapter", {"lora_name": "wrong", "lora_path": str(wrong)}
    )
    assert refused.status_code == 500, "vLLM's own, whatever an adapter lacks"
    assert "was trained on 'a/other', but the model served is" in refused.text
    again = {"lora_name": "first", "lora_path": str(adapters["first"])}
    refused = server.post("load_lora_adapter", again | {"load_inplace": True})
    assert refused.status_code == 500
    assert "load_inplace would read the adapter again" in refused.text
    unknown = server.post("completions", {"model": "wrong", "prompt": PROMPT})
    assert unknown.status_code == 404
    assert len(answer(server, "first")) == 20
