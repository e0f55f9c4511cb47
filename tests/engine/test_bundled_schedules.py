"""Floating canvases of the bundled model, with its adapter and without, against the plain loop."""

import random
from pathlib import Path

import pytest
from engines import EngineRoom, forwards, generate, params, token_ids

from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text

pytestmark = pytest.mark.slow

CANVAS, TOKENS = 32, 24
DRAW = random.Random(0)
SCHEDULES = [[32], [8], [4], [2], [3, 16, *(DRAW.randint(1, 12) for _ in range(200))]]


@pytest.mark.parametrize("strategy", ["d2f", "block_diffusion"])
def test_schedules_equal_the_plain_loop(strategy: str, room: EngineRoom) -> None:
    """Each of four problems by every schedule, at first all at once, then four of them alone."""
    dllm = {
        "strategy": strategy,
        "adaptive": "throughput",
        "threshold": 0.9,
        "min_window": 2,
    }
    dllm |= {"block_length": CANVAS, "canvas_length": CANVAS}
    adapter = default_model.adapter_path() if strategy == "d2f" else None
    if adapter is not None:
        dllm["lora_path"] = adapter
    llm = room.start("llada", dllm, True, model=default_model.path())
    tokenizer, folder = llm.get_tokenizer(), Path(default_model.path())
    model = PlainModel.load(folder, adapter=None if adapter is None else Path(adapter))
    texts = [one.question for one in problems_of(4)]
    jobs = [(tokenizer.encode(text), widths) for widths in SCHEDULES for text in texts]
    wishes = [params(TOKENS, dllm_schedule=widths) for _, widths in jobs]
    together = generate(llm, [prompt for prompt, _ in jobs], wishes)
    alone = [generate(llm, [jobs[i][0]], [wishes[i]])[0] for i in (0, 7, 14, 19)]
    compared = 0
    for i, output in [*enumerate(together), *zip((0, 7, 14, 19), alone, strict=True)]:
        prompt, widths = jobs[i]
        rules = Rules(
            "widths",
            block_length=CANVAS,
            canvas_length=CANVAS,
            widths=tuple(widths),
        )
        text = Text(model, prompt, TOKENS, rules, max_model_len=256)
        decode(text)
        if text.margin > 3e-4:
            assert (token_ids(output), forwards(output)) == text.result(), i
            compared += 1
    assert compared >= 12
