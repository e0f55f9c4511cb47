"""Hidden states and images over HTTP, from real servers."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from engines import CHECKPOINTS
from forked import PYTHON
from omni_models import Reference, autoregressive, pipeline
from omni_server import DIFFUPLUG, serving
from processes import START_SECONDS, Server, end, environment, spawn

from dllm_plugin.omni import hidden_state_args, pipeline_args

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as options of `vllm serve`."""
    words = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *value]
        else:
            words.append(f"{flag}={value}")
    return words


def array(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the tokenizer of another tiny checkpoint."""
    folder = autoregressive(
        tmp_path_factory.mktemp("served") / "llama", "Llama", vocab=320
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((CHECKPOINTS / "tiny-llada" / name).read_bytes())
    return folder


def test_hidden_states_over_http(llama: Path, tmp_path: Path) -> None:
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    options |= {
        "kv_cache_memory_bytes": 16 << 20,
        "chat_template": CHAT,
    } | hidden_state_args()
    with serving(llama, tmp_path / "log", *flags(options)) as server:
        check_completion(server, Reference(llama))


def check_completion(server: Server, reference: Reference) -> None:
    body = {
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    wish = {"vllm_xargs": {"return_hidden_states": 1}}
    for path, prompt in (
        ("completions", {"prompt": "a small cat"}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a small cat"}]},
        ),
    ):
        plain = server.post(path, body | prompt).json()["choices"][0]
        assert plain.get("routed_experts") is None
        answer = server.post(path, body | prompt | wish).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == plain["token_ids"]
        rows = array(choice["routed_experts"])
        prompt_ids = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
        wanted = reference.rows([*prompt_ids, *choice["token_ids"]])
        start = answer["usage"]["total_tokens"] - 1 - len(rows)
        error = (torch.from_numpy(rows.copy()) - wanted[start:]).abs().max()
        assert rows.dtype == np.float32 and error < 1e-4
    refused = server.post(
        "completions",
        body | {"prompt": "x", "vllm_xargs": {"return_hidden_states": "maybe"}},
    )
    assert refused.status_code == 400
    assert "return_hidden_states must be true or false, got 'maybe'" in refused.text
    stream = server.post("completions", body | {"prompt": "x", "stream": True} | wish)
    assert "over HTTP, no stream" in stream.text


def test_the_example_writes_an_image(tmp_path: Path) -> None:
    """The command in docs/omni.md."""
    import shlex

    from documented import ROOT, blocks
    from PIL import Image

    commands = [block.text for block in blocks("bash") if block.page == "omni.md"]
    [line] = [
        x for text in commands for x in text.splitlines() if "--output image.png" in x
    ]
    process = spawn(
        [PYTHON, str(ROOT / shlex.split(line)[1]), *shlex.split(line)[2:]],
        cwd=tmp_path,
        env=environment(),
    )
    try:
        assert process.wait(timeout=START_SECONDS) == 0
    finally:
        end(process)
    image = Image.open(tmp_path / "image.png")
    assert image.size == (32, 32) and len(image.getcolors(maxcolors=1024)) > 10


def test_images_over_http(tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline
    from PIL import Image

    folder = pipeline(tmp_path)
    pipe = DiffusionPipeline.from_pretrained(folder)
    options = {
        "dtype": "float32",
        "max_model_len": 2048,
        "api_key": "secret",
    } | pipeline_args()
    key = {"Authorization": "Bearer secret"}
    with serving(
        folder, tmp_path / "log", *flags(options), program=DIFFUPLUG
    ) as server:
        request = {
            "prompt": "a cat",
            "num_inference_steps": 2,
            "width": 16,
            "height": 16,
        }
        data = [
            request | {"seed": 1},
            request | {"seed": 2, "num_images_per_prompt": 2},
        ]
        url = f"{server.url}/pooling"
        answer = httpx.post(url, json={"model": "tiny", "data": data}, timeout=60)
        assert answer.status_code == 200, answer.text
        for seed, texts in enumerate(answer.json()["data"], start=1):
            expected = pipe(
                **request,
                generator=torch.Generator().manual_seed(seed),
                num_images_per_prompt=seed,
            ).images
            found = [Image.open(io.BytesIO(base64.b64decode(text))) for text in texts]
            assert [image.format for image in found] == ["PNG"] * seed
            assert [i.tobytes() for i in found] == [i.tobytes() for i in expected]
        for bad, sentence in (
            ({"prompt": 5}, "prompt must be a string, got 5"),
            (request | {"nonsense": 1}, "takes no nonsense"),
            (request | {"output_type": "pt"}, "output_type must be 'pil'"),
            ([request, {"prompt": 5}], "data[1]: prompt must be a string, got 5"),
        ):
            refused = httpx.post(url, json={"model": "tiny", "data": bad}, timeout=60)
            assert refused.status_code == 400 and sentence in json.dumps(refused.json())
        url, body = f"{server.url}/v1/pooling", {"model": "tiny", "data": data}
        assert httpx.post(url, json=body, timeout=60).status_code == 401
        again = httpx.post(url, json=body, timeout=60, headers=key)
        assert again.json()["data"] == answer.json()["data"]
