"""Code in the pages that is marked with ``<!-- test -->``, for the tests that run it."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MODEL_CARD = ROOT / "dllm_plugin" / "default_model" / "README.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    MODEL_CARD,
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

# Pages whose requests an engine test sends to the server that README starts.
REQUEST_PAGES = ("README.md", "docs/http-api.md")
_REQUEST = re.compile(
    r"^```bash\n(curl .*?)^```$(?:(?:(?!^#|^```).)*^```json\n(.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
_OUTPUT = re.compile(
    r"([^\n]*)\n\n```(?:json|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_BLOCK = re.compile(r"<!-- test -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block."""

    page: str
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    """The marked blocks of a language, in all pages."""
    return [
        Block(_name(page), found[1], found[2])
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
        if found[1] == language
    ]


def _name(page: Path) -> str:
    """Name a page by its file, a README of a folder by the folder."""
    if page.name == "README.md" and page.parent != ROOT:
        return page.parent.name
    return page.name


def example_of(page: str) -> str:
    """The complete Python program of a page, for the engine test that runs it as a file."""
    (example,) = [block.text for block in blocks("python") if block.page == page]
    return example


def requests_of(page: str) -> list[tuple[str, str]]:
    """Requests of a page, with the part of the reply that the page shows, or nothing."""
    return _REQUEST.findall((ROOT / page).read_text(encoding="utf-8"))


def outputs_of(page: Path) -> list[tuple[str, str]]:
    """Outputs that a page shows, each after the line before it."""
    return _OUTPUT.findall(page.read_text(encoding="utf-8"))
