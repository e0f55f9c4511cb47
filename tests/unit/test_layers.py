"""Who may import whom, who may touch vLLM, and how large things may grow. Reads source only."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "dllm_plugin"
BENCH = PACKAGE.parent / "diffuplug_bench"


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}

# What each folder may import of ours, anywhere; all below it, none above. Families, plan and
# methods are facts that every folder may read.
FOLDERS: dict[str, set[str]] = {
    "decoding": set(),
    "kernels": set(),
    "reference": set(),
    "grammar": {"decoding"},
    "config": {"decoding", "grammar"},
    "infilling": {"config"},
    "state": {"decoding", "config", "kernels"},
    "attention": {"decoding", "config", "state", "kernels"},
    "sampling": {"decoding", "config", "state", "kernels", "grammar"},
    "models": {"decoding", "config", "attention"},
    "engine": {
        *(
            "decoding",
            "config",
            "state",
            "attention",
            "sampling",
            "kernels",
            "models",
            "grammar",
        ),
    },
    "default_model": set(),
    "commands": {
        *(
            "decoding",
            "config",
            "attention",
            "models",
            "default_model",
            "reference",
            "infilling",
        ),
    },
    "api": {"decoding", "config", "infilling"},
    "omni": {"engine"},
}
# The package itself: version, and `register`, which vLLM calls.
ROOT = {"engine", "models"}
# What `diffuplug_bench`, the package beside this one, imports of ours.
MEASURING = {"commands", "config", "decoding", "default_model", "models", "reference"}
# Only these touch vLLM's engine at run time: what an upgrade of vLLM can break.
ENGINE_SIDE = {"attention", "engine", "omni"}
NO_VLLM = {"decoding", "grammar", "default_model"}
# The one assignment to an attribute of vLLM: (module, function).
PERMITTED = ("kernels.runner", "install")


class Import(NamedTuple):
    """One imported name."""

    module: str
    name: str
    typing_only: bool


def imports(name: str) -> Iterator[Import]:
    """Everything a module imports, at any depth; relative names made absolute."""
    package = f"dllm_plugin.{name}" if name else "dllm_plugin"
    is_package = SOURCES[name].name == "__init__.py"

    def visit(node: ast.AST, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                module = child.module or ""
                if child.level:
                    parts = package.split(".")[: None if is_package else -1]
                    parts = parts[: len(parts) - child.level + 1]
                    module = ".".join([*parts, *([module] if module else [])])
                for alias in child.names:
                    yield Import(module, alias.name, typing_only)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, "", typing_only)
            is_typing = (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            )
            yield from visit(child, typing_only or is_typing)

    yield from visit(TREES[name], False)


def own(name: str) -> set[str]:
    """Modules of this package that a module imports."""
    found = set()
    for imported in imports(name):
        if imported.module.split(".")[0] != "dllm_plugin":
            continue
        full = f"{imported.module}.{imported.name}".removeprefix("dllm_plugin").strip(
            "."
        )
        parent = imported.module.removeprefix("dllm_plugin").strip(".")
        found.add(full if full in SOURCES else parent)
    return found - {""}


def reaches(name: str, prefix: str, typing_too: bool = True) -> bool:
    modules = [i.module for i in imports(name) if typing_too or not i.typing_only]
    return any(
        module == prefix or module.startswith(prefix + ".") for module in modules
    )


def folder(name: str) -> str:
    return name.split(".")[0]


def test_the_top_level_is_short() -> None:
    """The folders above, and `__init__.py`: no module lies beside them."""
    entries = {p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"}
    assert entries == {*FOLDERS, "__init__.py"} and len(entries) <= 16


def test_folders_are_in_order() -> None:
    """No import runs back up: every folder is named before those that may import it."""
    order = list(FOLDERS)
    for name, below in FOLDERS.items():
        assert {order.index(other) < order.index(name) for other in below} <= {True}, (
            name
        )


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_folders_import_only_what_lies_below(name: str) -> None:
    allowed = ROOT if not name else FOLDERS[folder(name)] | {folder(name)}
    extra = {module for module in own(name) if folder(module) not in allowed}
    assert not extra, f"{name} may not import {sorted(extra)}"


def test_nothing_that_serves_imports_what_measures() -> None:
    """`diffuplug bench` is found by an entry point."""
    for name in SOURCES:
        assert not reaches(name, "diffuplug_bench"), name


def test_what_measures_imports_no_inside_of_the_engine() -> None:
    """It starts engines as users do, and asks workers by vLLM's `worker_extension_cls`."""
    found = set()
    for path in BENCH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            assert not node.level and node.module is not None, path
            for alias in node.names:
                package, *inner = [*node.module.split("."), alias.name]
                if package == "dllm_plugin":
                    found.add(inner[0])
    assert found == MEASURING


def test_what_measures_has_rooms() -> None:
    for folder in {path.parent for path in BENCH.rglob("*.py")}:
        lengths = [len(path.read_text().splitlines()) for path in folder.glob("*.py")]
        assert len(lengths) <= 16 and max(lengths) <= 400, folder


def test_modules_import_in_one_direction() -> None:
    """Inside of a folder too: no two modules need each other."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in own(name) & set(SOURCES):
                visit(other, (*path, name))
            done.add(name)

    for name in SOURCES:
        visit(name, ())


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_vllm_stays_where_it_belongs(name: str) -> None:
    if folder(name) in NO_VLLM:
        assert not reaches(name, "vllm")
    if folder(name) not in ENGINE_SIDE:
        assert not reaches(name, "vllm.v1", typing_too=False)
    if folder(name) != "omni":
        assert not reaches(name, "vllm_omni")
    if folder(name) != "api" and name != "commands.server":
        assert not reaches(name, "vllm.entrypoints", typing_too=False)


def test_dense_models_import_no_experts() -> None:
    """vLLM's layers of experts are 290 modules, and each server imports the class of its model."""
    dense = {module for module, _, _ in imports("models.llamas")}
    assert not [module for module in dense if "moe" in module or "quant" in module]


def test_folders_say_what_they_hold() -> None:
    for name, path in SOURCES.items():
        if path.name == "__init__.py":
            assert ast.get_docstring(TREES[name]), name


def rebindings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Assignments to attributes of something imported from vLLM: (function, target)."""
    bound = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "vllm"
        ):
            bound |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            vllm = [a for a in node.names if a.name.split(".")[0] == "vllm"]
            bound |= {alias.asname or "vllm" for alias in vllm}

    def root(node: ast.AST) -> str:
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return node.id if isinstance(node, ast.Name) else ""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        targets: list[ast.AST] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "delattr",
        ):
            targets = [ast.Attribute(node.args[0], "?", ast.Store())]
        for target in targets:
            if isinstance(target, ast.Attribute) and root(target) in bound:
                yield function, ast.unparse(target)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(tree, "")


def test_the_check_for_rebinding_sees_rebinding() -> None:
    source = (
        "import vllm.a as a\nfrom vllm.b import C\nimport vllm\nfrom x import D\n"
        "def f():\n    a.g = 1\n    C.h.i += 1\n    setattr(vllm.z, 'k', 2)\n    D.fine = 3\n"
    )
    assert [target for _, target in rebindings(ast.parse(source))] == [
        "a.g",
        "C.h.i",
        "vllm.z.?",
    ]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_of_vllm_is_rebound(name: str) -> None:
    found = [(name, function) for function, _ in rebindings(TREES[name])]
    assert found == ([PERMITTED] if name == PERMITTED[0] else [])


def functions() -> Iterator[tuple[str, str, int]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                yield name, node.name, node.end_lineno - node.lineno + 1


def test_names_of_test_files_differ() -> None:
    """`make test` collects all folders in one session, where equal names clash."""
    folders = (
        Path(__file__).parents[1] / name for name in ("unit", "kernels", "engine")
    )
    names = [path.name for folder in folders for path in folder.glob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_sizes() -> None:
    lengths = {
        name: len(path.read_text().splitlines()) for name, path in SOURCES.items()
    }
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert statistics.median(lengths.values()) <= 180
    # Two Triton kernels, whose parameters take a line each, are longer than 120 lines.
    long = [
        f for f in functions() if f[2] > (142 if f[0].startswith("kernels") else 60)
    ]
    assert long == []
