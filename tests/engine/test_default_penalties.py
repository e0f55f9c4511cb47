"""Penalties that a checkpoint's generation_config.json asks for refuse no plain request."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import CHECKPOINTS, EngineRoom, a_prompt, generate, token_ids
from processes import serving
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.usefixtures("template")

PENALTIES = {"repetition_penalty": 1.05, "presence_penalty": 0.5}
TURN = [{"role": "user", "content": "abc"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": "abc"},
    "/v1/messages": {"messages": TURN},
}


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose authors' file asks for penalties."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-llada"
    shutil.copytree(CHECKPOINTS / "tiny-llada", folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PENALTIES))
    return folder


def test_default_sampling_parameters(penalised: Path, room: EngineRoom) -> None:
    """They decode as without the file; a penalty that a request sends is still refused."""
    prompt, tokens = a_prompt(9), []
    for model in (CHECKPOINTS / "tiny-llada", penalised):
        llm = room.start("llada", {}, model=str(model))
        asked = llm.get_default_sampling_params()
        neutral = SamplingParams()
        for name in PENALTIES:
            assert getattr(asked, name) == getattr(neutral, name)
        asked.temperature, asked.max_tokens = 0.0, 20
        tokens.append([token_ids(one) for one in generate(llm, [prompt], asked)])
    assert tokens[0] == tokens[1]
    with pytest.raises(
        VLLMValidationError, match="repetition_penalty is not supported"
    ):
        generate(llm, [prompt], SamplingParams(repetition_penalty=1.05))


def test_every_route(penalised: Path, tmp_path: Path) -> None:
    """Requests without a penalty are served."""
    log = tmp_path / "log"
    with serving(log, model=penalised) as server:
        for path, body in BODIES.items():
            asked = {"model": "tiny", "max_tokens": 8} | body
            answer = httpx.post(f"{server.url}{path}", json=asked, timeout=60)
            assert answer.status_code == 200, (path, answer.text)
