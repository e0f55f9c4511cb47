"""The map of loads: what is made of timed steps."""

import json
import sys
from pathlib import Path

import pytest

from diffuplug_bench.adaptive import load_map
from diffuplug_bench.adaptive.load_map import Step, modelled, ratios, weight_bytes
from diffuplug_bench.cli import build_parser
from diffuplug_bench.model_shapes import SHAPES, Sizes
from dllm_plugin.decoding.acceptance import tokens_per_forward

ACCEPTED = (0.9, 2.5)
REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"


def steps() -> list[Step]:
    """Steps that cost 4 ms up to 128 positions and 0.02 ms for each further one."""
    grid = [(n, w, c) for n in (1, 256) for c in (512, 32_768) for w in (1, 2, 8, 32)]
    return [Step(n, w, c, 4.0 + 0.02 * max(0, n * w - 128)) for n, w, c in grid]


@pytest.mark.parametrize("shift", [False, True])
def test_ratios(shift: bool) -> None:
    """Few requests gain by wide windows; at many only shifted rows keep up."""
    points = {
        (p.requests, p.context): p
        for p in ratios(steps(), ACCEPTED, shift, 32, 300_000)
    }
    few, many = points[1, 512], points[256, 512]
    brings = tokens_per_forward(32, *ACCEPTED, shift)
    assert few.width == 32 and few.fixed == few.adaptive == pytest.approx(brings)
    assert many.width == (1 if shift else 2) and many.fixed < many.adaptive <= 1
    assert shift == (many.adaptive == 1)
    assert many.fits and not points[256, 32_768].fits and points[1, 32_768].fits


def test_the_model() -> None:
    """In ms of the smallest step; keys are read beside the weights, and again for wide steps."""
    dense = Sizes.of(SHAPES["dream-7b"])
    timed = [Step(1, 1, 1, 4.0), Step(64, 32, 8, 40.0), Step(64, 2, 8192, 9.0)]
    small, wide, long = modelled(timed, dense, 2)
    assert small == pytest.approx(4.0, rel=1e-3)
    assert wide == pytest.approx(4 + (2048 - 128) * 4 / 213, rel=1e-2)
    # 57,344 bytes a position, 7.6e9 parameters.
    reading = 1.4 * 0.75 * 4 * 64 * 8192 * 57_344 / 15.2e9
    assert long - 4.0 == pytest.approx(reading, rel=0.02)


def test_the_model_of_a_mixture() -> None:
    """Within a quarter of what an H100 measured, from one position to 8,192."""
    lines = (REPORTS / "h100.jsonl").read_text().splitlines()
    lines = [
        line
        for line in lines
        if '"llada2-mini"' in line and '"benchmark": "map"' in line
    ]
    [line] = map(json.loads, lines)
    timed = [Step(**step) for step in line["steps"]]
    assert len(timed) == 120
    sizes = Sizes.of(SHAPES["llada2-mini"])
    for step, ms in zip(timed, modelled(timed, sizes, 2), strict=True):
        assert 0.8 <= step.ms / ms <= 1.25, step
    # All experts are read in the end, each once.
    weights = weight_bytes(sizes, 2)
    assert weights.experts == 256 and weights.chosen == 8
    assert weights.small + 248 * weights.expert == pytest.approx(32.5e9, rel=0.01)


def test_the_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = build_parser().parse_args(["map", "--picture", "map.png"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="bench map --picture draws with matplotlib"):
        load_map.run(asked, [])
