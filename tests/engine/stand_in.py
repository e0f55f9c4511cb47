"""Stand in for a Python process that a fork of the template runs; arguments are Python's.

It hands over its arguments, environment, folder and open files, passes signals on, and ends as the
fork ends. What the template cannot run as a new interpreter would, Python itself runs.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time

START_SECONDS = 180.0  # until the template listens
AT_ONCE = 64  # descriptors per message; the kernel takes 253
PASSED_ON = {
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM")
}


def connect(name: str) -> socket.socket:
    """Connect to the template, which a test may have started just now."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect("\0" + name)
            return connection
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def inherited() -> list[int]:
    """Descriptors that whoever started this process left open for it."""
    found = []
    for text in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(text)):
                found.append(int(text))
        except OSError:
            continue  # that of the listing itself
    return sorted(found)


def send(
    connection: socket.socket, request: dict[str, object], descriptors: list[int]
) -> None:
    """A request: its length, its text, and descriptors in groups."""
    text = json.dumps(request).encode()
    connection.sendall(len(text).to_bytes(8, "big") + text)
    for i in range(0, len(descriptors), AT_ONCE):
        socket.send_fds(connection, [b"f"], descriptors[i : i + AT_ONCE])


def main() -> None:
    arguments, python = sys.argv[1:], os.environ["STAND_IN_PYTHON"]
    descriptors = inherited()
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    connection = connect(os.environ["STAND_IN_TEMPLATE"])

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the fork has ended
            connection.sendall(bytes([number]))

    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "leads": os.getpgrp() == os.getpid(),
        "group": os.getpgrp(),
        "cores": sorted(os.sched_getaffinity(0)),
        "blocked": sorted(waiting),
        "ignored": sorted(
            s for s in PASSED_ON if signal.getsignal(s) is signal.SIG_IGN
        ),
    }
    send(connection, request, descriptors)
    answer = connection.recv(1)
    if not answer:
        sys.exit("the template of the test run has ended")
    if answer == b"n":
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        os.execv(python, [python, *arguments])
    for (
        descriptor
    ) in descriptors:  # whoever waits for their end waits for the fork alone
        os.close(descriptor)
    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
    answer = connection.recv(4)
    status = int.from_bytes(answer, "big", signed=True) if len(answer) == 4 else 1
    if status < 0:  # ended by a signal, and so does this process
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
