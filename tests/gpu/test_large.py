"""LLaDA-8B shapes with dummy weights: the real server, CUDA graphs on, 64 concurrent requests."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent.parent / "goldens"
LLADA_8B = {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
    "max_sequence_length": 4096,
}


@pytest.fixture
def checkpoint(tmp_path):
    source = GOLDENS / "checkpoints" / "tiny-llada"
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | LLADA_8B
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(
    params=[{"strategy": "d2f", "canvas_length": 64}, {}], ids=["d2f", "auto"]
)
def server(checkpoint, tmp_path, request):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(checkpoint),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
    command += [
        "--max-num-seqs",
        "64",
        "--served-model-name",
        "llada",
        "--max-model-len",
        "2048",
    ]
    command += ["--additional-config", json.dumps({"dllm": request.param})]
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {})
    url = f"http://127.0.0.1:{port}"
    for _ in range(400):
        try:
            urllib.request.urlopen(f"{url}/health")
            break
        except OSError:
            assert process.poll() is None, (tmp_path / "server.log").read_text()[-6000:]
            time.sleep(1)
    yield url
    process.terminate()
    process.wait(60)
    print((tmp_path / "server.log").read_text()[-4000:])


def test_server_runs_64_concurrent_requests(server):
    from openai import AsyncOpenAI

    async def ask(client, number):
        answer = await client.completions.create(
            model="llada",
            prompt=[1 + (number + i) % 200 for i in range(256 + number)],
            max_tokens=96,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": {"dllm_threshold": 0.0}},
        )
        return answer.usage.completion_tokens

    async def ask_all():
        async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    started = time.perf_counter()
    assert asyncio.run(ask_all()) == [96] * 64
    print(f"64 requests x 96 tokens: {time.perf_counter() - started:.1f} s")
