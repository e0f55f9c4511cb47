"""Fingerprint what we override in vLLM, and what we rely on, from its sources.

    python tests/unit/vllm_bodies.py FOLDER 0.34

FOLDER holds a release's package `vllm`, unpacked and not imported. What moved since the last column
of `vllm_bodies.txt` is printed, and a column for the release is added to it.
"""

import ast
import hashlib
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_suffix(".txt")
GONE, UNKNOWN = "-", "?"  # not in a release; not looked for in it
LENGTH = 12  # hexadecimal digits of a fingerprint


def fingerprint(folder: Path, symbol: str) -> str:
    """Hash the code of `module:Class.function`, without comments, docstrings and annotations."""
    module, _, path = symbol.partition(":")
    base = folder.joinpath(*module.split(".")[1:])
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return GONE
    found = _parsed(file)
    for name in path.split("."):
        named = [node for node in _definitions(found) if _name(node) == name]
        if not named:
            return GONE
        found = named[-1]
    code = ast.dump(_Plain().visit(deepcopy(found)))
    return hashlib.sha256(code.encode()).hexdigest()[:LENGTH]


@cache
def _parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


def _definitions(owner: ast.AST) -> list[ast.AST]:
    """Definitions in a module or class, also those under a condition."""
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(owner):
        nodes.append(node)
        if isinstance(node, ast.If | ast.Try):
            nodes += _definitions(node)
    return nodes


def _name(node: ast.AST) -> str:
    return str(getattr(node, "name", "")) if isinstance(node, _NAMED) else ""


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class _Plain(ast.NodeTransformer):
    """Leaves out what does not run."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def read_table() -> tuple[list[str], dict[str, list[str]]]:
    """Versions, and by symbol a fingerprint for each of them."""
    head, *lines = TABLE.read_text().splitlines()
    rows = [line.split() for line in lines]
    return head.split()[1:], {symbol: marks for symbol, *marks in rows}


def write_table(versions: list[str], table: dict[str, list[str]]) -> None:
    """One line a symbol, in order."""
    lines = [" ".join(["symbol", *versions])]
    lines += [" ".join([symbol, *table[symbol]]) for symbol in sorted(table)]
    TABLE.write_text("\n".join(lines) + "\n")


def moved(table: dict[str, list[str]]) -> list[str]:
    """Symbols whose last two fingerprints differ."""
    known = {
        symbol: marks for symbol, marks in table.items() if UNKNOWN not in marks[-2:]
    }
    return [symbol for symbol, marks in sorted(known.items()) if marks[-1] != marks[-2]]


def main(folder: str, version: str) -> None:
    """Add a column, and print what moved."""
    versions, table = read_table()
    for symbol, marks in table.items():
        marks.append(fingerprint(Path(folder), symbol))
    write_table([*versions, version], table)
    for symbol in moved(table):
        print(symbol, "is gone" if table[symbol][-1] == GONE else "has another body")


if __name__ == "__main__":
    main(*sys.argv[1:])
