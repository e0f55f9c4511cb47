"""Run one command of ``diffuplug``; imports little, so an early Ctrl-C finds `main` running."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a failure, or 2 for wrong options."""
    if argv is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from . import parsers

    return parsers.run(argv)


def _end(number: int, _: Any) -> None:
    """End this process while it imports what would end it in order."""
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
