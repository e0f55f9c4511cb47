"""Find commands of other packages, such as ``diffuplug bench``, by their entry points."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

GROUP = "diffuplug.commands"


def load(name: str, words: str) -> Callable[[Any], int]:
    """Return the function of an entry point; `words` are what the user typed to get it.

    Raises ImportError if no installed distribution has the entry point.
    """
    for entry_point in metadata.entry_points(group=GROUP, name=name):
        function: Callable[[Any], int] = entry_point.load()
        return function
    raise ImportError(
        f"`{words}` is an entry point of the distribution diffuplug, which is not installed here: "
        "run `pip install` on it, a folder in PYTHONPATH is not enough"
    )
