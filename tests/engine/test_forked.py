"""A process that is forked behaves as one that Python starts: output, status, signals, children."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import PYTHON

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]
both = pytest.mark.parametrize(
    "python", [sys.executable, PYTHON], ids=["fresh", "forked"]
)

ABOUT = """
import json, os, signal, sys, tempfile
found = {
    "arguments": sys.argv, "first": sys.path[0], "folder": os.getcwd(), "name": __name__,
    "temporary": tempfile.gettempdir(), "variable": os.environ.get("OF_A_TEST"),
    "pythonpath": "/of/a/test" in sys.path, "cores": sorted(os.sched_getaffinity(0)),
    "input": sys.stdin.read(), "passed": os.read(int(sys.argv[1]), 100).decode(),
    "ignored": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
    "lines": [sys.stdout.line_buffering, sys.stderr.line_buffering],
}
print(json.dumps(found))
print("behind", file=sys.stderr)
sys.exit(3)
"""
ENDS = {
    "exception": ("print('begun'); raise ValueError('no')", 1),
    "sentence": ("import sys; print('begun'); sys.exit('a sentence')", 1),
    "end": ("print('begun')", 0),
    "killed": ("import os; print('begun', flush=True); os.kill(os.getpid(), 9)", -9),
    "interrupt": ("print('begun'); raise KeyboardInterrupt", -2),
    "thread": (
        "import atexit, threading, time; atexit.register(print, 'begun')\n"
        "threading.Thread(target=lambda: time.sleep(0.3)).start()",
        0,
    ),
}
WAITING = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "handles":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code])
print(os.getpid(), flush=True)
time.sleep(60)
"""
# As vLLM starts its engines; this file is read again in the child.
SPAWNING = """
import multiprocessing, os, sys
def work(queue):
    queue.put([os.environ["OF_A_TEST"], sys.argv, __name__])
    if len(sys.argv) > 1:
        sys.exit(4)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    os.environ["OF_A_TEST"] = "inherited"
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get(timeout=60))
    child.join()
    print(child.exitcode)
    sleeper = context.Process(target=__import__("time").sleep, args=(60,))
    sleeper.start()
    sleeper.terminate()
    sleeper.join()
    print(sleeper.exitcode)
"""


def run(
    python: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, **options
    )


def test_it_is_given_everything(tmp_path: Path) -> None:
    """Beside fresh Python, by code, script and module."""
    (tmp_path / "about.py").write_text(ABOUT)
    changes = {"OF_A_TEST": "é", "PYTHONPATH": "/of/a/test", "TMPDIR": str(tmp_path)}
    for program in (["-c", ABOUT], ["about.py"], ["-m", "about"], ["-u", "about.py"]):
        answers = []
        for python in (sys.executable, PYTHON):
            reading, writing = os.pipe()
            os.write(writing, b"through a pipe")
            os.close(writing)
            done = run(
                python,
                *program,
                str(reading),
                "-x",
                input="from a terminal",
                cwd=tmp_path,
                env=os.environ | changes,
                pass_fds=[reading],
                preexec_fn=lambda: (
                    signal.signal(signal.SIGHUP, signal.SIG_IGN),
                    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),
                ),
            )
            os.close(reading)
            found = json.loads(done.stdout)
            number = found["arguments"].pop(1)
            assert int(number) == reading
            answers.append((found, done.stderr, done.returncode))
        assert answers[0] == answers[1], program
        assert answers[1][0]["variable"] == "é" and answers[1][2] == 3


@both
@pytest.mark.parametrize("kind", ENDS)
def test_it_ends_alike(kind: str, python: str) -> None:
    code, status = ENDS[kind]
    done = run(python, "-c", code)
    assert (done.stdout, done.returncode) == ("begun\n", status)
    last = {
        "exception": "ValueError: no",
        "sentence": "a sentence",
        "interrupt": "KeyboardI",
    }
    assert last.get(kind, "") in (done.stderr.splitlines() or [""])[-1]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    for _ in range(100):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if text.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@both
@pytest.mark.parametrize(
    ("mode", "number", "status"),
    [
        ("dies", signal.SIGTERM, -15),
        ("handles", signal.SIGTERM, 5),
        ("dies", signal.SIGKILL, -9),
    ],
    ids=["ends", "handled", "killed"],
)
def test_signals_reach_it_and_its_children(
    mode: str, number: signal.Signals, status: int, python: str
) -> None:
    process = subprocess.Popen(
        [python, "-c", WAITING, mode], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    started = [int(process.stdout.readline()) for _ in range(2)]
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == status
    assert all(gone(pid) for pid in started)
    process.stdout.close()


@both
def test_a_signal_only_to_it_spares_its_children(python: str) -> None:
    process = subprocess.Popen([python, "-c", WAITING, "dies"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    started = {int(process.stdout.readline()) for _ in range(2)}
    process.terminate()
    assert process.wait(timeout=60) == -15
    time.sleep(0.2)
    left = [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert len(left) == 1
    os.kill(left[0], signal.SIGKILL)
    process.stdout.close()


@both
def test_processes_that_it_spawns(python: str, tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    done = run(python, "spawning.py", "one", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "['inherited', ['spawning.py', 'one'], '__mp_main__']", (
        done.stderr
    )
    assert lines[1:] == ["4", "-15"] and done.returncode == 0


def test_vllm_is_there_and_our_package_of_the_checkout(tmp_path: Path) -> None:
    """Where PYTHONPATH says otherwise, Python itself starts."""
    code = (
        "import sys; print('vllm' in sys.modules, 'dllm_plugin.engine' in sys.modules)"
    )
    done = run(PYTHON, "-c", code)
    assert done.stdout.split() == ["True", "True"]
    (tmp_path / "dllm_plugin").mkdir()
    done = run(PYTHON, "-c", code, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "VLLM_TARGET_DEVICE"])
def test_what_an_import_would_have_read_starts_afresh(variable: str) -> None:
    code = "import sys; print(sys.executable, 'vllm' in sys.modules)"
    done = run(PYTHON, "-c", code, env=os.environ | {variable: "other"})
    assert done.stdout.split() == [sys.executable, "False"]


def test_metrics_of_several_processes_lie_in_files(tmp_path: Path) -> None:
    """The kind of value is chosen while prometheus_client is imported."""
    code = "import prometheus_client as p; p.Counter('of_a_test', 'x').inc()"
    files = []
    for python in (sys.executable, PYTHON):
        folder = tmp_path / Path(python).name
        folder.mkdir()
        done = run(
            python,
            "-c",
            code,
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
        )
        assert done.returncode == 0, done.stderr
        files.append([file.name.rpartition("_")[0] for file in folder.iterdir()])
    assert files == [["counter"]] * 2


def test_openmp_binds_it_to_one_core() -> None:
    """As vLLM's ranks are bound on CPUs; threads inherit it."""
    core = max(os.sched_getaffinity(0))
    code = (
        "import os, sys, torch; print(os.sched_getaffinity(0), 'vllm' in sys.modules)"
    )
    bound = os.environ | {"GOMP_CPU_AFFINITY": str(core), "LD_PRELOAD": openmp()}
    answers = [
        run(python, "-c", code, env=bound).stdout for python in (sys.executable, PYTHON)
    ]
    assert answers == [f"{{{core}}} False\n", f"{{{core}}} True\n"]


def openmp() -> str:
    """The library that vLLM has its processes load first."""
    code = "import os, vllm; print(os.environ['LD_PRELOAD'])"
    return run(PYTHON, "-c", code).stdout.strip()
