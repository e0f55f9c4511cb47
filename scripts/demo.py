"""Serve the bundled model with `diffuplug serve` and ask it three questions over HTTP.

    python scripts/demo.py [--verbose] [--keep]

Prints every answer while it streams, then what it cost. The third is asked for JSON, and held to a
schema. The server listens on 127.0.0.1 at a free
port, fetches nothing, and is stopped however the demo ends, unless all went well and --keep was
given. Its log is a file, whose path is printed when something fails; with --verbose it is shown.
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

from diffuplug_bench.word_problems.generator import (
    ANSWER_SCHEMA,
    Problem,
    ask_in_json,
    problems_of,
)
from dllm_plugin.commands.generate import summary
from dllm_plugin.commands.phases import Screen, cause

START_SECONDS = 600
STOP_SECONDS = 30
MODEL = "diffuplug"
NEXT = """
Try next:
  {bin}diffuplug generate "Anna has 48 pencils. Then Anna loses 5 of the pencils. \
Anna buys 12 more pencils. How many pencils does Anna have now?"
  {bin}diffuplug serve
  {bin}diffuplug eval --limit 50
  make demo KEEP=1, which leaves the server running, with a page that shows each forward
"""
KEPT = """
Watch each forward in a browser: {url}/viewer
The server goes on as process {pid} (kill {pid} ends it); its log: {log}
"""


def main() -> int:
    """Run the demo; return 0 if all three answers came."""
    *problems, last = problems_of(3)
    problems.append(ask_in_json(last))
    keep = "--keep" in sys.argv[1:]
    with server("--verbose" in sys.argv[1:], keep) as (client, kept):
        counts = [ask(client, asked) for asked in problems]
    tokens, forwards, seconds = map(sum, zip(*counts, strict=True))
    print(f"\n{len(problems)} answers: {summary(int(tokens), int(forwards), seconds)}")
    print(kept if keep else NEXT.format(bin=folder_of_commands()), end="")
    return 0


def folder_of_commands() -> str:
    """Return where `diffuplug` lies, as it would be typed here."""
    return f"{Path(sys.executable).parent}/".removeprefix(f"{Path.cwd()}/")


def ask(client: Any, asked: Problem) -> tuple[int, int, float]:
    """Stream one answer to the terminal; return tokens, forwards and seconds."""
    print(f"\nQ: {asked.question}")
    held: dict[str, Any] = {}
    if asked.in_json:
        schema = {"name": "answer", "schema": ANSWER_SCHEMA}
        held["response_format"] = {"type": "json_schema", "json_schema": schema}
        print("   (with a JSON schema: a list of steps and a whole number)")
    print("A: ", end="", flush=True)
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": asked.question}],
        temperature=0,
        stream=True,
        # The last chunk then carries the token count, and what the request took.
        stream_options={"include_usage": True},
        extra_body={"diffusion": {}},
        **held,
    )
    tokens = forwards = 0
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
            forwards = num_forwards(chunk)
    seconds = time.perf_counter() - start
    print(f"\n   {summary(tokens, forwards, seconds)}")
    return tokens, forwards, seconds


def num_forwards(chunk: Any) -> int:
    """Return a request's forwards, from what its stream's last chunk says it took."""
    metrics = (chunk.model_extra or {}).get("metrics") or {}
    if "diffusion" not in metrics:
        raise RuntimeError("the server did not say what the answer took")
    return int(metrics["diffusion"]["forwards"])


@contextmanager
def server(verbose: bool, keep: bool) -> Iterator[tuple[Any, str]]:
    """Start a server, yield a client of it and what to say if it goes on; stop it afterwards.

    With `keep` it goes on, unless something failed. Its log is kept where it is needed.
    """
    port = free_port()
    command = [sys.executable, "-m", "dllm_plugin.commands.cli", "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # the phases of a start
    descriptor, name = tempfile.mkstemp(prefix="diffuplug-demo-", suffix=".log")
    log = Path(name)
    output = None if verbose else descriptor
    process = subprocess.Popen(
        command, stdout=output, stderr=output, env=environment, start_new_session=True
    )
    failed, done = False, False
    try:
        # This takes long, and the server starts meanwhile.
        from openai import OpenAI, OpenAIError

        url = f"http://127.0.0.1:{port}"
        with Screen(sys.stderr, sys.stdout, None if verbose else log) as screen:
            wait_until_healthy(process, url, log)
            screen.end(f"ready at {url}")
        kept = KEPT.format(url=url, pid=process.pid, log="above" if verbose else log)
        try:
            yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), kept
        except OpenAIError as error:
            raise RuntimeError(str(error)) from error
        done = True
    except RuntimeError:
        failed = not verbose
        raise
    finally:
        os.close(descriptor)
        if not (keep and done):
            # A ready server without requests ends at once by Ctrl-C, by SIGTERM in seconds.
            stop(process, signal.SIGINT if done else signal.SIGTERM)
        if failed:
            print(f"demo: the server's log: {log}", file=sys.stderr)
        elif verbose or not (keep and done):
            log.unlink()


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when /health answers; raise RuntimeError when the server ends or takes too long."""
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if process.poll() is not None:
            why = cause(log) or "its log says why"
            raise RuntimeError(
                f"the server ended with status {process.returncode}: {why}"
            )
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except OSError:  # not listening yet
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server was not up after {START_SECONDS} seconds")


def stop(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Ask the server by a signal to stop; kill it if it does not."""
    process.send_signal(number)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        # Its workers are in its own process session.
        os.killpg(process.pid, 9)
        process.wait()


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that the server is stopped too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as failure:
        sys.exit(f"demo: {failure}")
