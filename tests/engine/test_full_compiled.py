"""The compiled step of full attention: the recorded text, and nothing compiled late."""

from typing import Any

import pytest
import torch
from engines import EngineRoom, generate
from full_goldens import CANVAS, cases_of
from full_jobs import DECODERS, Decoder
from mixed import Counted, fresh_compiler
from test_full_goldens import check, wish_for

from dllm_plugin.sampling.decider import USUAL

pytestmark = pytest.mark.slow


def sampler_of(llm: Any) -> Any:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.sampler


# Code is translated anew for each family, with a cache and without: half a minute each, so each
# family and each kind of cache once. The others are only traced, which comes before a translation.
# The GPU tests translate all of it.
TRACED = [("eager", decoder) for decoder in DECODERS[1:5]]
TRANSLATED = [("inductor", DECODERS[0]), ("inductor", DECODERS[5])]


@pytest.mark.parametrize(
    ("backend", "decoder"),
    TRACED + TRANSLATED,
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_compiled_steps_take_the_same_decisions(
    decoder: Decoder, backend: str, room: EngineRoom
) -> None:
    """Traced only, or translated as well; of the engine's policy and of the other usual one.

    The code is the same, whichever of the two is the engine's.
    """
    family, strategy = decoder
    policy = sorted(USUAL)[DECODERS.index(decoder) % 2]
    cases = [
        c
        for c in cases_of(*decoder)
        if not c.is_random and c.numbers()["policy"] in USUAL
    ]
    assert cases
    dllm = {"strategy": strategy, "canvas_length": CANVAS, "policy": policy}
    llm = room.start(family, dllm, max_num_seqs=16)
    sampler = sampler_of(llm)
    uncompiled = sampler.rows.begin, sampler.decider.decide
    with fresh_compiler():
        with torch.inference_mode():
            sampler.compile(backend)
        sampler.decider.decide = counted = Counted(sampler.decider.decide)
        with torch._dynamo.config.patch(error_on_recompile=True):
            outputs = generate(
                llm, [c.prompt for c in cases], [wish_for(c) for c in cases]
            )
    sampler.rows.begin, sampler.decider.decide = uncompiled
    sampler.decider.compiled_for = None
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)
    assert sum(counted.sizes) == sum(case.record["num_forwards"] for case in cases)
