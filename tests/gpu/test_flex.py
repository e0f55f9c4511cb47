"""The `unified` layout on FlexAttention, the readable reference path: recorded decodes, fp32."""

import sys
from pathlib import Path

import pytest
from test_distinct import engine_of, run

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import test_grid_goldens as grid

FLEX = {"attention_backend": "FLEX_ATTENTION", "enforce_eager": True}


@pytest.mark.parametrize("model", ["sdar", "llada2.0"])
def test_absolute_grid(model):
    """Two requests at a time have more segments, and so attention rows, than vLLM has room for."""
    checkpoint = grid.GOLDENS / "checkpoints" / f"tiny-{model}"
    engine = engine_of(checkpoint, grid.CANVAS, max_num_seqs=2, **FLEX)
    cases = grid.cases_of(model)
    prompts, wishes = [c["prompt_ids"] for c in cases], [grid.wish(c) for c in cases]
    for i, output in run(engine, prompts, wishes):
        grid.check(cases[i], output)
