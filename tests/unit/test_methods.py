"""The table of methods is the one place that knows a strategy or a family by its name."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from dllm_plugin.config import options
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import (
    COLUMNS,
    OPTIONS,
    REQUEST_FIELDS,
    Numbers,
    Options,
)
from dllm_plugin.config.request.arguments import RequestArguments
from dllm_plugin.config.request.parsing import _remembered, request_arguments
from dllm_plugin.config.resolution import resolve
from dllm_plugin.decoding import families as strategy_names
from dllm_plugin.decoding.families import FAMILIES, TAKEN_BY
from dllm_plugin.decoding.method import Method
from dllm_plugin.decoding.methods import (
    METHODS,
    methods_of,
)

PACKAGE = Path(__file__).parents[2] / "dllm_plugin"
TABLES = [PACKAGE / "decoding" / name for name in ("methods.py", "families.py")]
CONSTANTS = {
    name: value for name, value in vars(strategy_names).items() if name.isupper()
}
STRATEGY_NAMES = {
    value: name for name, value in CONSTANTS.items() if isinstance(value, str)
}
FAMILY_NAMES = {family.name for family in FAMILIES.values()}


def decisions(tree: ast.AST) -> Iterator[str]:
    """Comparisons in which a strategy, its name, or the name of a family stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        members = [getattr(side, "elts", [side]) for side in sides]
        if any(names_one(member) for group in members for member in group):
            yield ast.unparse(node)


def names_one(node: ast.expr) -> bool:
    """Whether an expression is a strategy or a family by its name."""
    if isinstance(node, ast.Constant):
        return node.value in {*TAKEN_BY, *FAMILY_NAMES}
    text = ast.unparse(node)
    return text in STRATEGY_NAMES.values() or text.endswith(
        ("family.name", ".strategy")
    )


@pytest.mark.parametrize(
    "source",
    [
        "if config.family.name == 'x': pass",
        "a = settings.strategy in b",
        "a = strategy == D2F",
        "a = name != 'dual_cache'",
        "match strategy:\n    case 'd2f': pass",
    ],
)
def test_the_check_sees_decisions(source: str) -> None:
    assert len(list(decisions(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem
)
def test_nobody_else_asks_for_a_strategy_or_a_family(path: Path) -> None:
    # The plain loops are a second opinion, which may not read the table.
    if path not in TABLES and path.parent.name != "reference":
        assert list(decisions(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_every_row_is_whole() -> None:
    """Names agree, defaults are policies of the row, full attention is scheduled as such."""
    for (strategy, family), method in METHODS.items():
        assert method.strategy == strategy and family in FAMILY_NAMES
        assert {method.default_policy, method.edited_policy} <= set(method.policies)
        refreshed = (method.scheduler == "refresh", method.logits == "masked")
        assert set(refreshed) == {method.full_attention}
        without_cache = method.full_attention and not method.keeps_kv
        assert without_cache == ("full_graphs" in method.refuses)
        assert method.options <= set(REQUEST_FIELDS)


def test_every_family_has_a_method() -> None:
    assert {name for _, name in METHODS} == FAMILY_NAMES
    for family in FAMILIES.values():
        known = set(methods_of(family))
        if family.absolute_grid:
            assert known == {"block_diffusion"}
        elif "dual_cache" in known:
            assert known == set(methods_of(FAMILIES["LLaDAModelLM"]))
        elif "self_speculation" in known:
            assert known == {"block_diffusion", "self_speculation"}
        elif len(known) > 1:
            assert "semi_autoregressive" in known, "what `auto` becomes"


def test_every_option_is_read_by_some_method_or_by_the_engine() -> None:
    read = set().union(*(method.options for method in METHODS.values()))
    assert read == set(REQUEST_FIELDS)
    assert set(COLUMNS) <= set(REQUEST_FIELDS)


def test_config_classes_share_what_is_a_number() -> None:
    """A new number is one field: options and requests inherit it."""
    numbers = {field.name for field in dataclasses.fields(Numbers)}
    of_request = {field.name for field in dataclasses.fields(RequestArguments)}
    of_engine = {field.name for field in dataclasses.fields(DecodeConfig)}
    assert numbers <= set(REQUEST_FIELDS) <= of_request & set(OPTIONS)
    # A user's steps hold for blocks of any length, and are kept beside the defaults.
    assert of_engine & of_request == {"steps"}


def test_arguments_are_parsed_once() -> None:
    """The front end asks, then the scheduler, then the worker: the second one finds the answer."""
    config = resolve(Options(strategy="block_diffusion"), "LLaDAModelLM", 512, 300)
    arguments = {"dllm_threshold": 0.123, "other": [1]}
    before = _remembered.cache_info()
    first, second = (
        request_arguments(config, dict(arguments), 40 + i) for i in range(2)
    )
    after = _remembered.cache_info()
    assert first is second and after.misses == before.misses + 1
    assert after.maxsize is not None, "what is remembered has a bound"
    # Equal keys are not equal arguments.
    assert (
        request_arguments(config, {"dllm_max_active_blocks": 1}).max_active_blocks == 1
    )
    with pytest.raises(ValueError, match="got True"):
        request_arguments(config, {"dllm_max_active_blocks": True})


def test_options_import_nothing_heavy() -> None:
    tree = ast.parse(Path(options.__file__).read_text(encoding="utf-8"))
    imported = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert imported == {
        "collections.abc",
        "dataclasses",
        "dllm_plugin.decoding.families",
        "typing",
        "validation",
    }


def test_every_field_of_a_row_is_read() -> None:
    """And everything that a method refuses is asked for by whoever sets vLLM's options."""
    sources = [
        path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path not in TABLES
    ]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {field.name for field in dataclasses.fields(Method)} <= attributes
    asked = {
        node.left.value
        for node in nodes
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Constant)
        and ast.unparse(node.comparators[0]).endswith(".refuses")
    }
    assert asked == set().union(*(method.refuses for method in METHODS.values()))
