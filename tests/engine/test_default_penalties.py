"""Penalties and wrong values of a checkpoint's generation_config.json refuse no plain request."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import CHECKPOINTS, EngineRoom, a_prompt, generate, token_ids
from processes import INSIDE, serving
from vllm import SamplingParams

pytestmark = pytest.mark.usefixtures("template")

PENALTIES = {"repetition_penalty": 1.05, "presence_penalty": 0.5}
WRONG = {"temperature": -1.0, "top_p": 1.5, "top_k": "all"}
# transformers reads no presence_penalty from the file, so vLLM could not apply it.
WARNED = "generation_config.json asks for repetition_penalty 1.05, which is not applied"
TURN = [{"role": "user", "content": "abc"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": "abc"},
    "/v1/messages": {"messages": TURN},
}


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose authors' file asks for penalties, and for what nobody can have."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llada"
    shutil.copytree(CHECKPOINTS / "tiny-llada", folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PENALTIES | WRONG))
    return folder


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What our code logs from WARNING on; a filter stays where vLLM configures handlers anew."""
    ours = logging.getLogger("vllm.dllm_plugin")
    level, records = ours.level, []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return True

    ours.addFilter(keep)
    ours.setLevel(logging.WARNING)
    yield records
    ours.setLevel(level)
    ours.removeFilter(keep)


def test_default_sampling_parameters(
    penalised: Path, room: EngineRoom, logged: list[logging.LogRecord]
) -> None:
    """They decode as without the file; a penalty that a request sends is in force."""
    prompt, tokens = a_prompt(9), []
    for model in (CHECKPOINTS / "tiny-llada", penalised):
        llm = room.start("llada", {}, model=str(model))
        asked = llm.get_default_sampling_params()
        neutral = SamplingParams()
        for name in (*PENALTIES, "temperature", "top_p", "top_k"):
            assert getattr(asked, name) == getattr(neutral, name)
        asked.temperature, asked.max_tokens = 0.0, 20
        tokens.append([token_ids(one) for one in generate(llm, [prompt], asked)])
    assert tokens[0] == tokens[1]
    warnings = [one for one in logged if WARNED in one.getMessage()]
    assert [one.levelname for one in warnings] == ["WARNING"]
    wrong = "asks for temperature -1.0, top_k 'all', top_p 1.5, which"
    assert [one for one in logged if wrong in one.getMessage()]
    asked.repetition_penalty = 1.5
    assert [token_ids(one) for one in generate(llm, [prompt], asked)] != tokens[0]


def test_every_route(penalised: Path, tmp_path: Path) -> None:
    """Requests without a penalty are served; one warning at start names the file's."""
    log = tmp_path / "log"
    # The level at which `diffuplug serve` logs by default.
    variables = INSIDE | {"VLLM_LOGGING_LEVEL": "WARNING"}
    with serving(log, model=penalised, **variables) as server:
        for path, body in BODIES.items():
            asked = {"model": "tiny", "max_tokens": 8} | body
            answer = httpx.post(f"{server.url}{path}", json=asked, timeout=60)
            assert answer.status_code == 200, (path, answer.text)
    assert log.read_text().count(WARNED) == 1
