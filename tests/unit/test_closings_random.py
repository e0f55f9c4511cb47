"""Closings of four hundred random grammars, half on each backend."""

import os
from collections.abc import Iterator

import pytest
from grammar_loop import Compiler
from test_closings import close_random_texts

# vLLM gives xgrammar an argument that it no longer reads.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]
TRIALS = int(os.environ.get("DIFFUPLUG_GRAMMAR_TRIALS", "400"))


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def compiler(request: pytest.FixtureRequest, single_rank: None) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.close()


def test_no_text_of_many_stays_open(compiler: Compiler) -> None:
    close_random_texts(compiler, TRIALS)
