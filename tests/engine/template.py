"""Import vLLM once, and fork this process for each that tests start: `template.py STAND_IN`.

It starts no thread and no engine. Whoever asks is a `stand_in.py`. A fork is given the arguments,
environment, folder and open files of its stand-in and runs the module, script or code that they
name. An environment that would have been read while vLLM was imported is refused: such a process
is started afresh.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import heap
import stand_in
from preload import APPLIED, ENVIRONMENT, LIBRARIES, import_all, is_other_package
from take_over import PLACE, end_of, program_of, take_over
from waits import sleep_between_messages


@dataclass
class Child:
    """A fork, and the stand-in that waits for it."""

    pid: int
    ended: int  # descriptor
    connection: socket.socket
    leads: bool
    group: int  # of its stand-in: each fork leads a group of its own, with all that it starts

    def kill(self, number: int) -> None:
        """Signal the process, or its group where the stand-in leads one."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if self.leads else os.kill)(self.pid, number)


def received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or a `ConnectionError`."""
    text = b""
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            raise ConnectionError("the stand-in has ended")
        text += part
    return text


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the descriptors that came with it."""
    request = json.loads(
        received(connection, int.from_bytes(received(connection, 8), "big"))
    )
    came: list[int] = []
    while len(came) < len(request["descriptors"]):
        text, more, _, _ = socket.recv_fds(connection, 1, stand_in.AT_ONCE)
        if not text:
            raise ConnectionError("the stand-in has ended")
        came += more
    return request, came


class Template:
    """Answers stand-ins until nobody holds it."""

    def __init__(
        self, listener: socket.socket, decided: set[str], before: dict[str, str]
    ) -> None:
        self.listener = listener
        self.decided = decided
        self.environment = before
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.children: dict[int, Child] = {}
        self.killed: set[int] = set()
        self.holders: set[Any] = set()
        self.hold(open(os.dup(0), "rb", 0))  # noqa: SIM115 - who started this process
        self.fork: tuple[dict[str, Any], list[int]] | None = None  # set in a fork alone

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return in each fork with what it shall run, and here when the last holder has gone."""
        while self.holders:
            for key, _ in self.selector.select():
                key.data()
                if self.fork:
                    return self.fork
        for child in self.children.values():
            child.kill(signal.SIGKILL)
        return None

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        try:
            request, came = receive(connection)
        except ConnectionError:
            connection.close()
            return
        if "arguments" not in request:
            self.hold(connection)
            return
        if request["group"] in self.killed:  # it started this one at its end
            for descriptor in came:
                os.close(descriptor)
            connection.close()
            return
        reason = self.refusal(request)
        if reason:
            print(
                f"a process starts afresh because of {reason}",
                file=sys.stderr,
                flush=True,
            )
            for descriptor in came:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                connection.sendall(b"n")
            connection.close()
            return
        self.start(connection, request, came)

    def refusal(self, request: dict[str, Any]) -> str:
        """Why a new interpreter would differ from a fork, if it would."""
        wanted = request["environment"]
        if is_other_package(wanted.get("PYTHONPATH", "")):
            return "PYTHONPATH"
        for name in sorted(wanted.keys() | self.environment.keys()):
            decides = name in self.decided or name.startswith(LIBRARIES)
            if not decides or name in APPLIED:
                continue
            if name == PLACE and wanted.get(name, "").isdigit():
                continue  # one core, to which a fork binds itself
            # What an import sets, a process that a fork starts finds set.
            if wanted.get(name) not in (
                self.environment.get(name),
                ENVIRONMENT.get(name),
            ):
                return name
        arguments = request["arguments"]
        return "" if program_of(arguments) else f"its arguments {arguments}"

    def start(
        self, connection: socket.socket, request: dict[str, Any], came: list[int]
    ) -> None:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            self.leave()
            self.fork = request, came
            return
        with contextlib.suppress(OSError):  # the fork has done so, or even ended
            os.setpgid(pid, pid)
        for descriptor in came:
            os.close(descriptor)
        ended = os.pidfd_open(pid)
        child = Child(pid, ended, connection, request["leads"], request["group"])
        self.children[pid] = child
        self.killed.discard(pid)
        self.watch(child.ended, partial(self.finish, child))
        self.watch(connection, partial(self.hear, child))
        with contextlib.suppress(OSError):
            connection.sendall(b"f")

    def leave(self) -> None:
        """Close what is the template's."""
        self.selector.close()
        self.listener.close()
        for child in self.children.values():
            child.connection.close()
            os.close(child.ended)
        for holder in self.holders:
            holder.close()

    def hear(self, child: Child) -> None:
        """Pass a signal on; a stand-in that was killed takes its fork and all below along."""
        if child.pid not in self.children:
            return  # both were ready at once, and its end came first
        try:
            numbers = child.connection.recv(16)
        except ConnectionError:
            numbers = b""
        for number in numbers:
            child.kill(number)
        if not numbers:
            self.selector.unregister(child.connection)
            family = self.family(child)
            self.killed |= {fork.pid for fork in family}
            # None may see another end, or it would say so.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for fork in family:
                    fork.kill(number)

    def family(self, child: Child) -> list[Child]:
        """Return a fork and all below it."""
        found = [child]
        for parent in found:
            found += [c for c in self.children.values() if c.group == parent.pid]
        return found

    def finish(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            child.connection.sendall(code.to_bytes(4, "big", signed=True))
        self.selector.unregister(child.ended)
        os.close(child.ended)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(child.connection)
        child.connection.close()
        del self.children[child.pid]

    def hold(self, holder: Any) -> None:
        """Go on until its other end is closed."""
        self.holders.add(holder)
        self.watch(holder, partial(self.release, holder))

    def release(self, holder: Any) -> None:
        self.selector.unregister(holder)
        holder.close()
        self.holders.remove(holder)

    def watch(self, what: Any, then: Any) -> None:
        self.selector.register(what, selectors.EVENT_READ, then)


def main(python: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + os.environ["STAND_IN_TEMPLATE"])
    except OSError:
        return  # another process of the test run was first
    listener.listen(128)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.remove(here)
    path = list(sys.path)
    # Processes that forks start are forks too.
    sys.executable = python
    before = dict(ENVIRONMENT)
    decided = import_all()
    sleep_between_messages()
    after = {k: v for k, v in ENVIRONMENT.items() if before.get(k) != v}
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads, and a fork takes one along"
    heap.collect_all()
    heap.keep_frozen()  # a collection would copy each page into the fork
    work = Template(listener, decided, before).serve()
    if work is None:
        os._exit(0)  # to take vLLM apart would take a second, and say what leaked
    request, came = work
    ours = {
        k: v for k, v in after.items() if request["environment"].get(k) == before.get(k)
    }
    request["environment"] |= ours
    take_over(request, came, path)
    end_of(request["arguments"])


if __name__ == "__main__":
    main(*sys.argv[1:])
