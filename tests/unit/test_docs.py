"""The commands and programs in the documentation exist and take the options that are shown."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from documented import (
    MODEL_CARD,
    PAGES,
    REQUEST_PAGES,
    ROOT,
    Block,
    blocks,
    outputs_of,
    requests_of,
)

from diffuplug_bench import cli as bench
from diffuplug_bench.eval import tables
from dllm_plugin.commands import parsers, serve
from dllm_plugin.config.options import OPTIONS, REQUEST_PREFIX, Options
from dllm_plugin.config.request.arguments import ARGUMENTS

CODE = re.M | re.S
COMMANDS = [
    (block.page, line)
    for block in blocks("bash")
    for line in block.text.replace("\\\n", " ").splitlines()
    if line
]
MAKE_TARGETS = re.findall(
    r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: value[:60])
def test_command(page: str, line: str) -> None:
    words = shlex.split(line)
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        assert arguments and set(arguments) <= set(MAKE_TARGETS)
        return
    if program == "python":  # an engine test runs it
        assert (ROOT / arguments[0]).is_file()
        return
    if program == "vllm" or "--config-format" in arguments:
        serve_with_omni(arguments)
        return
    assert program == "diffuplug", f"{page}: no rule to check {line!r}"
    if arguments[0] in ("bench", "eval"):
        package = bench if arguments[0] == "bench" else tables
        package.build_parser().parse_args(arguments[1:])
        return
    if arguments[0] != "serve":
        parsers.build_parser().parse_args(arguments)
        return
    options, rest = serve.split_options(arguments[1:])
    config, _ = serve.take_config(rest)
    Options.from_user((config or {}).get("dllm", {}) | options)


def serve_with_omni(arguments: list[str]) -> None:
    """The options are exactly those that the helper for Python gives."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dllm_plugin.omni import hidden_state_args, pipeline_args

    assert arguments[0] == "serve"
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[1:])
    helper = hidden_state_args() if "--worker-cls" in arguments else pipeline_args()
    assert {name: getattr(parsed, name) for name in helper} == helper
    options = {word for word in arguments if word.startswith("--")}
    assert options == {f"--{name.replace('_', '-')}" for name in helper}


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")


def test_objects_of_options_are_taken() -> None:
    """Those in sentences, such as `--structured-outputs-config '{...}'`, by vLLM's parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, found = make_arg_parser(FlexibleArgumentParser()), 0
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        for option, value in re.findall(r"`(--[\w-]+) '(\{.*?\})'`", text):
            parser.parse_args(["--model", "x", option, value])
            found += 1
    assert found


def test_request_arguments_exist() -> None:
    """Every `dllm_*` name in the pages is one that a request may set."""
    known = {REQUEST_PREFIX + name for name in ARGUMENTS} | {"dllm_plugin"}
    for page in PAGES:
        named = set(
            re.findall(r"\bdllm_[a-z_]*[a-z]", page.read_text(encoding="utf-8"))
        )
        assert named <= known, f"{page.name}: {sorted(named - known)}"


def links(page: Path) -> list[tuple[Path, str]]:
    """Return file and anchor of each link to a file of the repository."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=CODE)
    found = []
    for target in re.findall(r"\]\(\s*([^()\s]+)\s*\)", text):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            found.append(((page.parent / file).resolve() if file else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=CODE)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.replace(" ", "-"))
    return found


REPORTS = sorted((ROOT / "benchmarks" / "reports").glob("*.md"))


@pytest.mark.parametrize(
    "page",
    [*PAGES, *REPORTS, ROOT / "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_hold(page: Path) -> None:
    """Files exist, and headings where a link names one."""
    for file, anchor in links(page):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file.name}#{anchor}"


def test_every_page_is_reachable() -> None:
    """By links, from README."""
    reached = {ROOT / "README.md"}
    ahead = [*reached]
    while ahead:
        for file, _ in links(ahead.pop()):
            if file.suffix == ".md" and file not in reached:
                reached.add(file)
                ahead.append(file)
    assert {*PAGES, *REPORTS} <= reached


def test_printed_outputs_are_tested() -> None:
    """By `test_documented_requests.py`; the line before another output calls it an example."""
    tested = {text for _, text in outputs_of(MODEL_CARD)}
    for page in REQUEST_PAGES:
        tested |= {shown for _, shown in requests_of(page)}
    untested = []
    for path in PAGES:
        for line, text in outputs_of(path):
            if text not in tested and "example" not in line:
                untested.append((path.name, text))
    assert not untested


def test_folders_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("```")[1]
    folders = {name for name in re.findall(r"^  (\w+\.py|\w+/) ", tree, re.M)}
    present = {path.name for path in (ROOT / "dllm_plugin").glob("*.py")}
    for package in ("dllm_plugin", "diffuplug_bench"):
        rooms = (ROOT / package).glob("*/__init__.py")
        present |= {f"{path.parent.name}/" for path in rooms}
    assert folders == present


def test_the_page_of_options_is_generated() -> None:
    """With every option and argument: run scripts/options_page.py after a change."""
    made = runpy.run_path(str(ROOT / "scripts" / "options_page.py"))["page"]()
    assert made == (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for name in OPTIONS:
        assert f"\n| `{name}`" in made, name
    for name in ARGUMENTS:
        assert f"\n| `{REQUEST_PREFIX}{name}`" in made, name


def test_pages_are_short() -> None:
    """A page that nobody finishes says nothing: README, and a page a report."""
    lengths = {
        page: len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES
    }
    reports = (ROOT / "benchmarks" / "reports").glob("*.md")
    lengths |= {
        page: len(page.read_text(encoding="utf-8").splitlines()) for page in reports
    }
    assert lengths[ROOT / "README.md"] <= 160
    long = {
        p.name: n for p, n in lengths.items() if p.parent.name == "reports" and n > 120
    }
    assert long == {}
