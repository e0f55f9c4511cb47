"""Scripts of `benchmarks/`, whose figures reports quote: each imports what there is today."""

import importlib
import sys

import pytest
from documented import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # some take functions of another one
    before = set(sys.modules)
    try:
        assert importlib.import_module(name).__doc__
    finally:
        for added in set(SCRIPTS) & (set(sys.modules) - before):
            del sys.modules[added]
