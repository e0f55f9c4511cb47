"""Two GPUs share the experts of a mixture: fp32, Triton attention, CUDA graphs and eager, async.

Under data parallelism the ranks step together: one without requests computes dummies.

Where vLLM finds no libnccl.so.2, VLLM_NCCL_SO_PATH names the file. Data parallelism needs one with
ncclCommSuspend, which NCCL 2.28.9 lacks: docs/support.md says what serves.
"""

import asyncio
import random
import time

import pytest
import recorded
import test_grid_goldens
import torch
from engines import a_prompt, params, token_ids

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

MODELS = ["sdar-moe", "llada2.1"]
EAGER = pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
SECONDS = (
    120  # of one piece of work: a rank that waits for the other one would wait for ever
)


@pytest.mark.parametrize("model", MODELS)
@EAGER
def test_tensor_parallel(model, eager):
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    recorded.check_blocks(model, enforce_eager=eager, **options)


class Ranks:
    """Two data-parallel ranks, and requests that say which one computes them."""

    def __init__(self, model, eager):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.model, self.blocks, self.sent = model, recorded.blocks_of(model), 0
        settings = recorded.settings_of(
            f"checkpoints/tiny-{model}",
            test_grid_goldens.CANVAS,
            data_parallel_size=2,
            enable_expert_parallel=True,
            enforce_eager=eager,
            max_num_batched_tokens=2048,
        )
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    def stream(self, rank, prompt, wish):
        self.sent += 1
        prompt, name = {"prompt_token_ids": prompt}, f"request-{self.sent}"
        return self.engine.generate(prompt, wish, name, data_parallel_rank=rank)

    async def answer(self, rank, prompt, wish):
        """The whole output of one request."""
        from vllm.sampling_params import RequestOutputKind

        wish.output_kind = RequestOutputKind.FINAL_ONLY
        [output] = [output async for output in self.stream(rank, prompt, wish)]
        return output

    async def check(self, cases, ranks):
        """Compare recorded decodes, all at once, with what the reference gives."""
        wishes = [(case["prompt_ids"], self.blocks.wish(case)) for case in cases]
        answers = (self.answer(r, *wish) for r, wish in zip(ranks, wishes, strict=True))
        for case, output in zip(
            cases, await within(asyncio.gather(*answers)), strict=True
        ):
            self.blocks.check(case, output)


async def within(work):
    return await asyncio.wait_for(work, SECONDS)


async def one_prefills(ranks):
    """The other rank's dummy is one request of as many tokens, more than the context has."""
    prompts = [a_prompt(280 + 7 * i, i) for i in range(6)]

    def wish():
        return params(24, dllm_policy="threshold")

    for busy in (0, 1):
        answers = (ranks.answer(busy, prompt, wish()) for prompt in prompts)
        together = await within(asyncio.gather(*answers))
        for prompt, output in zip(prompts, together, strict=True):
            alone = await within(ranks.answer(1 - busy, prompt, wish()))
            assert token_ids(output) == token_ids(alone), len(prompt)


async def twenty_waves(ranks):
    """Requests on one rank or both; now and then the ranks have gone to sleep before."""
    cases, drawn = ranks.blocks.cases_of(ranks.model), random.Random(0)
    for wave in range(20):
        some = drawn.sample(cases, drawn.randint(1, len(cases)))
        where = [[0], [1], [0, 1]][wave % 3]
        await ranks.check(some, [drawn.choice(where) for _ in some])
        await asyncio.sleep(drawn.choice([0, 0, 0.2, 0.5]))


async def only_request_goes(ranks):
    """Aborted in its prefill or behind its first tokens, on either rank; then all goes on."""
    from vllm.sampling_params import RequestOutputKind

    cases = ranks.blocks.cases_of(ranks.model)[:3]
    for rank, outputs in ((0, 0), (1, 0), (0, 1), (1, 1)):
        wish = params(
            400, dllm_policy="low_confidence", output_kind=RequestOutputKind.DELTA
        )
        stream = ranks.stream(rank, a_prompt(100, rank), wish)
        if outputs:
            delta = await within(anext(stream))
            assert 0 < len(token_ids(delta)) < 400
        else:
            began = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            began.cancel()
            await asyncio.gather(began, return_exceptions=True)
        await stream.aclose()
        await ranks.check(cases, [1 - rank, rank, 1 - rank])


@pytest.mark.parametrize("model", MODELS)
@EAGER
def test_data_parallel(model, eager):
    async def work():
        began, ranks = time.monotonic(), Ranks(model, eager)
        try:
            config = ranks.engine.vllm_config
            assert (
                config.model_config.is_moe
                and config.parallel_config.enable_expert_parallel
            )
            print(f"started in {time.monotonic() - began:.0f} s")
            for part in (one_prefills, twenty_waves, only_request_goes):
                began = time.monotonic()
                await part(ranks)
                print(f"{part.__name__}: {time.monotonic() - began:.1f} s")
        finally:
            ranks.engine.shutdown()

    asyncio.run(work())
