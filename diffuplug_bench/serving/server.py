"""Start ``diffuplug serve`` in its own process, with a tokenizer for dummy weights; stop it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from diffuplug_bench.model_shapes import Config
from dllm_plugin.commands.options import flag_of
from dllm_plugin.commands.phases import cause

MODEL = "diffuplug"  # as requests name it
START_SECONDS, STOP_SECONDS, CALL_SECONDS = 600, 30, 120
# By no proxy, which would look for the server on its own machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def command_of(options: dict[str, Any], port: int) -> list[str]:
    """Return the command that serves a model with the keyword arguments of ``vllm.LLM``."""
    options = dict(options)
    arguments = [options.pop("model"), "--served-model-name", MODEL]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    arguments.append("--disable-uvicorn-access-log")
    for name, value in options.items():
        flag = flag_of(name)
        if value is True:
            arguments.append(flag)
        elif value is not False:  # which is the default of each of these
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [flag, text]
    return [sys.executable, "-m", "dllm_plugin.commands.cli", "serve", *arguments]


@contextmanager
def serving(options: dict[str, Any], log: Path) -> Iterator[str]:
    """Serve a model as long as the context is open; yield the server's address.

    Raises ValueError with the cause if it does not start; its log goes to a file.
    """
    port = _free_port()
    # The route by which weights are filled exists only in vLLM's development mode.
    names = ["VLLM_SERVER_DEV_MODE", "VLLM_ENABLE_V1_MULTIPROCESSING"]
    names += ["HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"]
    environment = os.environ | dict.fromkeys(names, "1")
    environment.pop("VLLM_PLUGINS", None)  # our plugin has to be among them
    command = command_of(options, port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):  # its workers are in its session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fill_weights(url: str, seed: int) -> None:
    """Fill the model of a server whose workers have the benchmark's extension."""
    body = json.dumps({"method": "fill_weights", "args": [seed]}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/collective_rpc", body, headers)
    _DIRECT.open(request, timeout=CALL_SECONDS).close()


def forwards_of(url: str) -> float:
    """Return the forwards of all requests that a server has answered, from its metrics."""
    with _DIRECT.open(f"{url}/metrics", timeout=CALL_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    total = 0.0
    for line in lines:
        if line.startswith("diffuplug:request_forwards_sum"):
            total += float(line.rsplit(" ", 1)[1])
    return total


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            text = log.read_text(encoding="utf-8", errors="replace")
            last = text.strip().rpartition("\n")[2]
            raise ValueError(f"the server did not start: {cause(log) or last}")
        with suppress(OSError):  # not listening yet
            _DIRECT.open(f"{url}/health", timeout=2).close()
            return
        time.sleep(0.2)
    raise ValueError(f"the server was not up after {START_SECONDS} seconds.")


def write_tokenizer(config: Config, folder: Path) -> str:
    """Write a tokenizer with a word for each token of the model; return its folder.

    It is byte-level, as those of the models are, so that texts of tokens are put together alike.
    """
    from tokenizers import Tokenizer, decoders, models

    size = config.get("embedding_size") or config["vocab_size"]
    # A space is written so in a byte-level vocabulary.
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
    words = {f"{space}w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    chosen = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chosen), encoding="utf-8")
    return str(folder)
