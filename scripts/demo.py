"""Serve the bundled model with `diffuplug serve` and ask it three questions over HTTP.

Prints every answer while it streams, then tokens per second and tokens per forward. The server
listens on 127.0.0.1 at a free port, fetches nothing, and is stopped however the demo ends.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError
from tqdm import tqdm

from dllm_plugin.commands.problems.generator import eval_seeds, problem

START_SECONDS = 600
STOP_SECONDS = 30
MODEL = "diffuplug"


def main() -> int:
    """Run the demo; return 0 if all three answers came."""
    questions = [problem(seed).question for seed in eval_seeds(3)]
    with server() as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        tokens, forwards, seconds = 0, 0, 0.0
        for question in questions:
            counts = ask(client, question)
            tokens += counts[0]
            forwards += counts[1]
            seconds += counts[2]
    print(
        f"\n{len(questions)} answers: {tokens} tokens in {forwards} forwards, "
        f"{tokens / forwards:.2f} tokens per forward, {tokens / seconds:.0f} tokens per second"
    )
    return 0


def ask(client: OpenAI, question: str) -> tuple[int, int, float]:
    """Stream one answer to the terminal; return tokens, forwards and seconds."""
    print(f"\nQ: {question}\nA: ", end="", flush=True)
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stream=True,
        # The last chunk then carries the token count and the request's own decoding statistics.
        stream_options={"include_usage": True},
    )
    tokens = forwards = 0
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
            forwards = num_forwards(chunk)
    seconds = time.perf_counter() - start
    print(
        f"\n   {tokens} tokens, {forwards} forwards, {tokens / forwards:.2f} tokens per forward, "
        f"{tokens / seconds:.0f} tokens per second"
    )
    return tokens, forwards, seconds


def num_forwards(chunk: Any) -> int:
    """Return a request's denoising forwards, from the statistics on its stream's last chunk."""
    metrics = (chunk.model_extra or {}).get("metrics") or {}
    forwards = int((metrics.get("speculative_decoding") or {}).get("num_spec_steps", 0))
    if not forwards:
        raise RuntimeError("the server sent no denoising statistics with the answer")
    return forwards


@contextmanager
def server() -> Iterator[str]:
    """Start a server and yield its address; stop it afterwards, and print its log on failure."""
    port = free_port()
    command = [sys.executable, "-m", "dllm_plugin.commands.cli", "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(process, url, log)
            yield url
        except (RuntimeError, OpenAIError):
            print_tail(log)
            raise
        finally:
            stop(process)


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when /health answers; raise RuntimeError when the server ends or takes too long."""
    start = time.monotonic()
    pause = 0.5 if sys.stderr.isatty() else 5.0  # a log gets a line each time
    with tqdm(desc="starting vllm serve", bar_format="{desc} {elapsed} {postfix}") as bar:
        while time.monotonic() - start < START_SECONDS:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
            except OSError:  # not listening yet
                time.sleep(pause)
                # The log's last line, without its prefix, says what the server is doing.
                bar.set_postfix_str(" ".join(tail(log, 1)).rpartition("] ")[2][:60])
            else:
                bar.set_postfix_str("ready")
                return
    raise RuntimeError(f"the server was not up after {START_SECONDS} seconds")


def tail(log: Path, lines: int) -> list[str]:
    """Return the last lines of a file."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]


def print_tail(log: Path) -> None:
    """Print the end of the server's log."""
    print("\n--- end of the server log ---", *tail(log, 60), "-" * 29, sep="\n", file=sys.stderr)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop; kill it if it does not."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        # Its workers are in its own process session.
        os.killpg(process.pid, 9)
        process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, OpenAIError) as failure:
        sys.exit(f"demo: {failure}")
