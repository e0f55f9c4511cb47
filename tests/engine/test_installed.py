"""Install the wheel beside vLLM, with nothing of the repository, and run it as the image does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from documented import ROOT
from processes import INSIDE, KEY, environment, free_port, ready
from wheels import build_wheel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel and what vLLM needs."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder)
    make = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
    subprocess.run(make, check=True)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install"]
    install += ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, wheel], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Packages there are found after the wheel's, the editable install of this tree is not.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "vllm.pth").write_text("\n".join(packages), encoding="utf-8")
    return python.parent


def variables(programs: Path) -> dict[str, str]:
    """Changes of the variables for a process that finds these programs first."""
    return {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": ""}


def entry_point(dockerfile: str) -> list[str]:
    """The command of an image."""
    text = (ROOT / "deploy" / dockerfile).read_text(encoding="utf-8")
    (line,) = [x for x in text.splitlines() if x.startswith("ENTRYPOINT ")]
    return list(json.loads(line.removeprefix("ENTRYPOINT ")))


def test_doctor_of_the_installed_wheel(programs: Path, tmp_path: Path) -> None:
    where = "import dllm_plugin; print(dllm_plugin.__file__)"
    for command in (["diffuplug", "doctor"], ["python", "-c", where]):
        done = subprocess.run(
            [programs / command[0], *command[1:]],
            cwd=tmp_path,
            env=environment(**variables(programs)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(programs.parent))


def test_the_command_of_the_image_answers(programs: Path, tmp_path: Path) -> None:
    """With the bundled model, and a key from the environment as the manifests give it."""
    command, port = entry_point("cpu.Dockerfile"), free_port()
    command[0] = str(programs / command[0])
    command[command.index("8000")] = str(port)
    settings = variables(programs) | {"VLLM_API_KEY": KEY}
    with ready(command, port, tmp_path / "log", **INSIDE, **settings) as server:
        models = f"{server.url}/v1/models"
        assert httpx.get(models, timeout=60).status_code == 401
        server.headers["Authorization"] = f"Bearer {KEY}"
        listed = httpx.get(models, headers=server.headers, timeout=60)
        (model,) = listed.json()["data"]
        question = {"role": "user", "content": "What can you do?"}
        body = {"model": model["id"], "messages": [question], "max_tokens": 64}
        reply = server.post("chat/completions", body)
        assert reply.status_code == 200, reply.text
