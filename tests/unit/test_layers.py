"""Who may import whom, who may touch vLLM, and how large things may grow. Reads source only."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "dllm_plugin"


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}

# Rooms of a denoising step and of the configuration: what of our own they may import, anywhere.
ROOMS: dict[str, set[str]] = {
    "plan": set(),
    "kernels": set(),
    "kernels.reference": {"plan"},
    "kernels.cpu": set(),
    "kernels.row_scan": set(),
    "kernels.row_stats": {"kernels.reference", "kernels.row_scan"},
    "kernels.part_reference": {"kernels.reference"},
    "vocab_shard": {"kernels.reference"},
    "kernels.move_rows": set(),
    "kernels.paged_reference": set(),
    "kernels.paged_store": set(),
    "kernels.span_kernel": set(),
    "kernels.rotated_store": set(),
    "kernels.rotated_reference": set(),
    "kernels.paged_attention": {"kernels.span_kernel"},
    "policies": {"plan", "kernels.reference"},
    "strategies": {"plan", "kernels.reference", "policies"},
    "choices": {"models"},
    "special_tokens": {"models"},
    "guidance": set(),
    "compiled": set(),
    "beside": set(),
    "cublas": set(),
    "slot_table": set(),
    "option_checks": {"choices", "models"},
    "config": {"choices", "models", "option_checks"},
    "registration": {"config", "engine_config"},
    "states": {
        "slot_table",
        "choices",
        "config",
        "plan",
        "policies",
        "strategies",
        "kernels.reference",
    },
    "rows": {
        *("beside", "compiled", "guidance", "plan", "states", "strategies"),
        *("kernels", "kernels.move_rows", "kernels.reference"),
    },
    "layouts": set(),
    "layouts.choice": {"layouts.parts"},
    "layouts.flex": set(),
    "layouts.flash": {"config", "kernels.rotated_store", "layouts.parts", "row_counts"},
    "layouts.rotation": {"layouts.flash"},
    "layouts.parts": {"config"},
    "layouts.spans": set(),
    "layouts.distinct": {
        *("kernels", "kernels.paged_attention", "kernels.paged_reference", "kernels.paged_store"),
        "layouts.choice",
    },
    "row_counts": {"config"},
    "attention": {
        *("layouts.parts", "layouts.spans", "plan", "row_counts", "rows", "states", "strategies"),
    },
    "bad_words": {"plan", "states"},
    "token_rules": {"bad_words", "plan", "slot_table", "states"},
    "logprobs": {"plan", "states", "kernels.reference"},
    "leads": {"logprobs", "plan", "rows", "states", "token_rules", "kernels.reference"},
    "proposals": {
        *("logprobs", "plan", "rows", "states", "token_rules", "vocab_shard"),
        *("kernels", "kernels.part_reference", "kernels.reference", "kernels.row_stats"),
    },
    "deciding": {
        *("choices", "compiled", "config", "kernels.reference", "leads", "logprobs", "plan"),
        *("policies", "proposals", "rows", "states", "strategies", "token_rules"),
    },
    "sampler": {
        "config",
        *("compiled", "deciding", "guidance", "leads", "logprobs", "proposals", "rows", "states"),
        *("kernels", "kernels.move_rows", "strategies", "token_rules", "vocab_shard"),
    },
    "model_state": {
        *("attention", "config", "kernels.cpu", "layouts.choice", "sampler", "states"),
        "vocab_shard",
    },
    "scheduler": {"config"},
    "refresh_scheduler": {"guidance", "scheduler", "strategies"},
    "admission": {"config", "strategies"},
    "graph_sizes": {"config"},
    "worker": {"config", "graph_sizes"},
    "settled": {"config", "graph_sizes", "layouts.choice"},
    "engine_config": {
        *("admission", "config", "graph_sizes", "layouts.choice", "models", "settled"),
        "special_tokens",
    },
    "metrics": {"models"},
}
SETTINGS = (
    *("choices", "special_tokens", "option_checks", "config", "registration", "engine_config"),
    *("admission", "metrics", "layouts.choice", "graph_sizes", "settled", "cublas"),
)
STEP = {name for name in ROOMS if name not in SETTINGS}
COMMANDS = {"cli", "doctor", "evaluate", "evaluate_all", "host_bench", "offline", "report"}
COMMANDS |= {name for name in SOURCES if name.split(".")[0] == "bench"}
NO_VLLM = {
    "compiled",
    "plan",
    "kernels",
    "kernels.reference",
    "policies",
    "strategies",
    "guidance",
    "choices",
}
NO_VLLM |= {"kernels.paged_reference", "kernels.part_reference", "compiled", "row_counts"}
NO_VLLM |= {"beside", "cublas", "kernels.rotated_reference"}
# What an upgrade of vLLM's engine can break.
ENGINE_SIDE = {
    *("states", "attention", "sampler", "model_state", "scheduler", "token_rules", "bad_words"),
    *("logprobs", "admission", "metrics", "engine_config", "kernels.cpu"),
    *("rows", "proposals", "leads", "deciding", "refresh_scheduler", "slot_table"),
    *("layouts.choice", "layouts.spans", "layouts.distinct", "layouts.flex", "layouts.rotation"),
    *("layouts.flash", "layouts.parts", "worker", "settled"),
}
# The one assignment to an attribute of vLLM: (module, function).
PERMITTED = ("kernels.cpu", "_complete_triton_placeholder")


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
            is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from visit(child, typing_only or is_typing)

    yield from visit(TREES[name], False)


def own(name: str) -> set[str]:
    """Modules of this package that a module imports."""
    found = set()
    for imported in imports(name):
        if imported.module.split(".")[0] != "dllm_plugin":
            continue
        full = f"{imported.module}.{imported.name}".removeprefix("dllm_plugin").strip(".")
        parent = imported.module.removeprefix("dllm_plugin").strip(".")
        found.add(full if full in SOURCES else parent)
    return found - {""}


def reaches_vllm(name: str, prefix: str, typing_too: bool = True) -> bool:
    modules = [i.module for i in imports(name) if typing_too or not i.typing_only]
    return any(module == prefix or module.startswith(prefix + ".") for module in modules)


def test_every_module_has_a_place() -> None:
    placed = {name for name in SOURCES if name.split(".")[0] in ("models", "default_model", "omni")}
    assert set(SOURCES) - placed - {""} - COMMANDS == set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_import_only_what_lies_below(name: str) -> None:
    allowed = ROOMS[name]
    extra = {i for i in own(name) if i not in allowed and i.split(".")[0] not in allowed}
    assert not extra, f"{name} may not import {sorted(extra)}"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_vllm_stays_where_it_belongs(name: str) -> None:
    if name in NO_VLLM or name.split(".")[0] == "default_model":
        assert not reaches_vllm(name, "vllm")
    if name not in ENGINE_SIDE and name.split(".")[0] != "omni":
        assert not reaches_vllm(name, "vllm.v1", typing_too=False)
        if not name.startswith("models"):
            assert not reaches_vllm(name, "vllm.v1")


@pytest.mark.parametrize("name", [n for n in SOURCES if n.split(".")[0] == "models"])
def test_models_know_no_strategy(name: str) -> None:
    """What drives them is named once, lazily, for vLLM's hook."""
    rest = {i for i in own(name) if i.split(".")[0] != "models"}
    driven = {"config", "cublas", "layouts.choice", "layouts.rotation", "model_state"}
    assert rest <= (driven if name == "models.base" else set())


def test_strategies_know_no_model() -> None:
    for name in STEP:
        assert not any(i.split(".")[0] == "models" for i in own(name)), name


def test_the_default_model_stands_alone() -> None:
    for name in SOURCES:
        inside = name.split(".")[0] == "default_model"
        if inside:
            assert all(i.split(".")[0] == "default_model" for i in own(name)), name
        elif name in ROOMS or name.split(".")[0] == "models":
            assert not any(i.split(".")[0] == "default_model" for i in own(name)), name


def test_commands_use_no_room_of_the_step() -> None:
    for name in COMMANDS:
        assert not own(name) & STEP, name


def test_text_and_omni_do_not_know_each_other() -> None:
    for name in SOURCES:
        others = {i.split(".")[0] for i in own(name)}
        if name.split(".")[0] == "omni":
            assert others <= {"omni"}, name
        else:
            assert "omni" not in others, name
        if name.split(".")[0] != "omni":
            assert not reaches_vllm(name, "vllm_omni"), name


def rebindings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Assignments to attributes of something imported from vLLM: (function, target)."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
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
    assert [target for _, target in rebindings(ast.parse(source))] == ["a.g", "C.h.i", "vllm.z.?"]


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


def test_sizes() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert statistics.median(lengths.values()) <= 180
    long = [f for f in functions() if f[2] > (120 if f[0].startswith("kernels") else 60)]
    assert long == []
