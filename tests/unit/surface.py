"""What vLLM's classes and functions look like, for the lists of what we rely on."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dllm_plugin", "diffuplug_bench")
GRAMMARS = ("engine/grammars", "engine/scheduling/grammar")
WEIGHTS = ("engine/worker/weight_updates", "engine/worker/cpu_worker")
LISTED_ELSEWHERE = ("omni", "api", *GRAMMARS, *WEIGHTS)


def arguments(function: Any) -> str:
    """Argument names and defaults: ``self a b=None * c``."""
    words, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        has_default = parameter.default is not parameter.empty
        default = f"={parameter.default!r}" if has_default else ""
        words.append(prefix.get(parameter.kind, "") + parameter.name + default)
    return " ".join(words)


def found_in_vllm(name: str) -> Any:
    """What `module:Class.attribute` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"vllm.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found


def fields_of(owner: type) -> set[str]:
    """Fields of a dataclass, struct or named tuple, and attributes that the class assigns."""
    names = set(getattr(owner, "__struct_fields__", ())) | set(
        getattr(owner, "_fields", ())
    )
    if dataclasses.is_dataclass(owner):
        names |= {f.name for f in dataclasses.fields(owner)}
    for node in ast.walk(ast.parse(inspect.getsource(owner))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def listed_imports(table: str) -> set[tuple[str, str]]:
    """Modules and names of a table; no name is the module itself."""
    rows = [line.split(": ", 1) for line in table.strip().splitlines()]
    return {
        (module, name.strip('"')) for module, names in rows for name in names.split()
    }


def made_imports(*prefixes: str) -> Iterator[tuple[str, str]]:
    """What modules import of vLLM: those of prefixes with a list of their own, or all others."""
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix().removeprefix("dllm_plugin/")
        if not (
            name.startswith(prefixes)
            if prefixes
            else not name.startswith(LISTED_ELSEWHERE)
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "vllm"
            ):
                yield from ((str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (
                    (a.name, "") for a in node.names if a.name.split(".")[0] == "vllm"
                )


def import_test(table: str) -> Any:
    """Return a test of each name in a table of imports."""

    @pytest.mark.parametrize("module,name", sorted(listed_imports(table)))
    def test(module: str, name: str) -> None:
        found = importlib.import_module(module)
        assert hasattr(found, name), f"{name} is gone from {module}"

    return test


def signature_test(table: dict[str, str]) -> Any:
    """Return a test of the arguments of each callable in a table."""

    @pytest.mark.parametrize("name", list(table))
    def test(name: str) -> None:
        assert arguments(found_in_vllm(name)) == table[name]

    return test


def field_test(table: dict[type, str]) -> Any:
    """Return a test of the fields of each class in a table."""

    @pytest.mark.parametrize("owner", list(table), ids=lambda owner: owner.__name__)
    def test(owner: type) -> None:
        assert set(table[owner].split()) - fields_of(owner) == set()

    return test


def property_test(table: dict[Any, str]) -> Any:
    """Return a test of what each class in a table has besides its fields."""

    @pytest.mark.parametrize("owner", list(table), ids=lambda owner: owner.__name__)
    def test(owner: type) -> None:
        missing = [name for name in table[owner].split() if not hasattr(owner, name)]
        assert missing == []

    return test
