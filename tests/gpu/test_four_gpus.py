"""Four GPUs give the tokens of one: stages, replicas, and experts that ranks share, in float32."""

import asyncio
from pathlib import Path
from typing import Any

import made_checkpoints
import pytest
import recorded
import test_grid_goldens
import torch
from engines import letters, params, token_ids

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")

FULL = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


@pytest.mark.parametrize(
    "options", [FULL, {"enforce_eager": True}], ids=["graphs", "eager"]
)
def test_four_stages(tmp_path: Path, options: dict[str, Any]) -> None:
    """A layer each."""
    folder = made_checkpoints.make_a2d(tmp_path / "a2d", "Qwen2", num_hidden_layers=4)
    prompts = [letters(length, length) for length in (1, 32, 70, 5, 90, 44, 3, 64)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for more in ({}, {"pipeline_parallel_size": 4}):
        given = {"model": str(folder)} | options | more
        llm = recorded.start("", test_grid_goldens.CANVAS, **given)
        outputs = llm.generate(inputs, params(40), use_tqdm=False)
        llm.llm_engine.engine_core.shutdown()
        found.append([token_ids(output) for output in outputs])
    assert found[0] == found[1] and all(found[0])


WAYS = {
    "replicas": ("sdar", {"data_parallel_size": 4}),
    "replicas-of-ranks": (
        "sdar",
        {"data_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    "experts": ("sdar-moe", {"data_parallel_size": 4, "enable_expert_parallel": True}),
    "experts-of-ranks": (
        "llada2.1",
        {
            "data_parallel_size": 2,
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
        },
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_replicas(way: str, eager: bool) -> None:
    """Recorded decodes three times over, on ranks in turn."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    model, options = WAYS[way]
    settings = recorded.settings_of(
        f"checkpoints/tiny-{model}",
        test_grid_goldens.CANVAS,
        max_num_batched_tokens=2048,
        **({"enforce_eager": True} if eager else FULL),
        **options,
    )
    blocks, ranks = recorded.blocks_of(model), options["data_parallel_size"]
    cases = blocks.cases_of(model) * 3

    async def work() -> list[Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

        async def one(i: int) -> Any:
            wish = blocks.wish(cases[i])
            wish.output_kind = RequestOutputKind.FINAL_ONLY
            prompt = {"prompt_token_ids": cases[i]["prompt_ids"]}
            rank = i % ranks
            stream = engine.generate(
                prompt, wish, f"request-{i}", data_parallel_rank=rank
            )
            [output] = [output async for output in stream]
            return output

        try:
            jobs = asyncio.gather(*(one(i) for i in range(len(cases))))
            return await asyncio.wait_for(jobs, 120)
        finally:
            engine.shutdown()

    for case, output in zip(cases, asyncio.run(work()), strict=True):
        blocks.check(case, output)
