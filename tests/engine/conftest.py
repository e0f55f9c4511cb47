"""Engine tests run vLLM itself. Engines live in this process, one at a time."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import spread
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
# In process: failures carry their traceback, and tests may look at the scheduler and the model.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# What that caches cannot be loaded again on CPUs: each process would compile for 25 s.
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
# Tiny matrices: a second thread costs more than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests speak HTTP, and each new client would read all of the machine's certificates for 50 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

import forked  # noqa: E402
import heap  # noqa: E402
from engines import CHECKPOINTS, FAMILIES, MASK_IDS, EngineRoom, named_engines  # noqa: E402
from processes import INSIDE, KEYED, KILLED_SOON, Server, serving  # noqa: E402
from waits import sleep_between_messages  # noqa: E402

from dllm_plugin import default_model  # noqa: E402
from dllm_plugin.reference.model import PlainModel  # noqa: E402

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Print warnings of vLLM's dependencies, which are no errors here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """It imports vLLM while the first tests run."""
    wanted = any(
        "template" in getattr(item, "fixturenames", ()) for item in session.items
    )
    if wanted and not session.config.option.collectonly:
        forked.start()


def pytest_sessionfinish() -> None:
    forked.stop()


@pytest.fixture(scope="session")
def template() -> None:
    """Asked for by modules whose processes, or those of vLLM, are forks of the template."""
    forked.start()


@pytest.fixture(scope="session", autouse=True)
def kernels_are_registered_once() -> Iterator[None]:
    """vLLM looks for its kernels in all modules whenever an engine starts: most of a start."""
    from vllm.platforms.cpu import CpuPlatform

    register = CpuPlatform.__dict__["register_triton_kernel_overrides"]
    patch = pytest.MonkeyPatch()
    once = classmethod(cache(register.__func__))
    patch.setattr(CpuPlatform, "register_triton_kernel_overrides", once)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def asleep() -> None:
    """In engines of this process that have workers of their own."""
    sleep_between_messages()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Also when torch was imported, and had counted the cores, before this file."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    """Engines of this process end without a walk through all that was imported."""
    heap.freeze()
    heap.keep_frozen()


@pytest.fixture(scope="session")
def room() -> Iterator[EngineRoom]:
    """The place where engines live."""
    room = EngineRoom()
    yield room
    room.close()


@pytest.fixture(scope="module")
def workers_end_soon(room: EngineRoom) -> Iterator[None]:
    """Workers of engines in this process end within a second, and before the next module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KILLED_SOON.items():
            patch.setenv(name, value)
        yield
        room.close()


@pytest.fixture
def llm(request: pytest.FixtureRequest, room: EngineRoom) -> Any:
    """An engine that tests of several files share; the test's parameters name it."""
    return room.start(**named_engines()[spread.engine_of(request.node)])


@pytest.fixture(scope="session")
def plain_models() -> dict[str, PlainModel]:
    """The tiny checkpoints in plain torch, by family."""
    return {name: PlainModel.load(CHECKPOINTS / f"tiny-{name}") for name in MASK_IDS}


# Module scope lets pytest run all tests of one family and scheduling on one engine.
@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Which tiny checkpoint: logits in place, or shifted by one."""
    return str(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def overlapped(request: pytest.FixtureRequest) -> bool:
    """Whether the next step is scheduled before the result of this one is known."""
    return bool(request.param)


@pytest.fixture(scope="session")
def tiny_server(
    template: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server under full attention by dual cache, with a key, behind a proxy's path.

    Nothing is said about VLLM_PLUGINS.
    """
    with serving(tmp_path_factory.mktemp("tiny") / "log", *KEYED, **INSIDE) as server:
        yield server


@pytest.fixture(scope="session")
def client(tiny_server: Server) -> Iterator[httpx.Client]:
    """A client of that server, which sends its key."""
    url, headers = tiny_server.url, tiny_server.headers
    with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def bundled_server(
    template: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of the bundled model as README starts it, which calls tools."""
    options = ["--served-model-name", "tiny", "diffuplug", "--max-model-len=512"]
    options += ["--max-num-seqs=64", f"--kv-cache-memory-bytes={256 << 20}"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    log, model = tmp_path_factory.mktemp("bundled") / "log", default_model.path()
    with serving(log, *options, model=Path(model), **INSIDE) as server:
        yield server
