"""Full attention refuses what it cannot honour, with the numbers; neighbours are served."""

from typing import Any

import pytest
from engines import EngineRoom, a_prompt, free_pages, generate, params, token_ids
from full_jobs import FullJob, start
from test_requests_refused import refusal

GOOD = FullJob(
    a_prompt(12), 32, {"policy": "low_confidence", "steps": 4, "block_length": 16}
)
UNCACHED = ("llada", "semi_autoregressive")
LLADA: list[tuple[dict[str, Any], str]] = [
    ({"dllm_policy": "origin"}, "dllm_policy 'origin' has no meaning"),
    ({"dllm_alg_temp": 0.5}, "dllm_alg_temp has no effect"),
    ({"dllm_top_p": 0.9}, "dllm_top_p has no effect"),
    ({"dllm_eps": 0.1}, "dllm_eps has no effect"),
    ({"dllm_cfg_scale": -1}, "dllm_cfg_scale must be a number between"),
    ({"dllm_cfg_scale": "much"}, "dllm_cfg_scale must be a number"),
    ({"dllm_logits_eos_inf": "no"}, "dllm_logits_eos_inf must be true or false"),
    ({"dllm_block_add_threshold": 0.5}, "dllm_block_add_threshold has no effect"),
    ({"dllm_max_active_blocks": 2}, "dllm_max_active_blocks 2 exceeds"),
    ({"dllm_block_length": 49}, "dllm_block_length 49 is longer than the canvas of 48"),
    ({"dllm_strategy": "dual_cache"}, "dllm_strategy belongs to the server"),
    ({"dllm_full_refresh_every": 2}, "dllm_full_refresh_every has no effect"),
    ({"dllm_refresh_before": 4}, "dllm_refresh_before has no effect"),
    (
        {"dllm_suffix_window": -1},
        "dllm_suffix_window must be a whole number of at least 0",
    ),
    ({"dllm_suffix_window": 2**40}, "dllm_suffix_window must be at most"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
]
DREAM: list[tuple[dict[str, Any], str]] = [
    ({"dllm_cfg_scale": 0.5}, "dllm_cfg_scale has no effect"),
    ({"dllm_logits_eos_inf": True}, "dllm_logits_eos_inf has no effect"),
    ({"dllm_policy": "random", "dllm_alg_temp": 0.5}, "dllm_alg_temp has no effect"),
    ({"dllm_steps": 1}, "dllm_steps must be at least 2"),
    ({"dllm_top_p": 0.0}, "dllm_top_p must be greater than 0"),
    ({"dllm_top_k": -1}, "dllm_top_k must be a whole number"),
    (
        {"dllm_full_refresh_every": 0},
        "dllm_full_refresh_every must be a whole number between 1",
    ),
    (
        {"dllm_refresh_before": 4},
        "dllm_refresh_before has no effect with full_refresh_every 1",
    ),
    (
        {"dllm_full_refresh_every": 2, "dllm_refresh_before": 0},
        "dllm_refresh_before must be at least 1 on DreamModel, got 0",
    ),
    ({"dllm_top_p": 0.9, "temperature": 0.5}, "dllm_top_p filters greedy requests"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
]


@pytest.mark.parametrize(
    ("decoder", "wrong"),
    [(UNCACHED, LLADA), (("dream", "prefix_cache"), DREAM)],
    ids=str,
)
def test_request(decoder: tuple[str, str], wrong: Any, room: EngineRoom) -> None:
    llm = start(room, decoder)
    for options, sentence in wrong:
        assert sentence in refusal(llm, a_prompt(9), params(20, **options)), options
    assert "mask token" in refusal(
        llm, [1, 300 if decoder == UNCACHED else 279], params(8)
    )
    [output] = generate(llm, [GOOD.prompt], GOOD.wish())
    assert token_ids(output) == GOOD.decode(decoder).answer()


def test_a_pass_larger_than_a_step(room: EngineRoom) -> None:
    """Prompt and whole blocks of the answer; guidance doubles them; a bit less is served."""
    llm = start(room, UNCACHED, max_num_batched_tokens=96, max_num_seqs=4)
    message = refusal(llm, a_prompt(50), params(47, dllm_block_length=16))
    assert "98 positions" in message and "max_num_batched_tokens is 96" in message
    message = refusal(
        llm, a_prompt(30), params(20, dllm_block_length=16, dllm_cfg_scale=0.5)
    )
    assert "62 positions, twice, since cfg_scale is set, at once" in message
    for job in (
        FullJob(a_prompt(48), 48, GOOD.numbers),
        FullJob(a_prompt(16), 32, GOOD.numbers | {"cfg_scale": 0.5}),
    ):
        [output] = generate(llm, [job.prompt], job.wish())
        assert token_ids(output) == job.decode(UNCACHED).answer()


def test_more_pages_than_there_are(room: EngineRoom) -> None:
    """vLLM starts only with pages for one whole context; a guided request may need more."""
    llm = start(room, UNCACHED, block_size=32, num_gpu_blocks_override=6)
    assert free_pages(llm) == 5
    message = refusal(llm, a_prompt(50), params(30, dllm_cfg_scale=1.0))
    assert "needs 6 pages of 32 tokens of KV cache for 82 positions twice" in message
    assert "there are 5" in message
    guided = FullJob(a_prompt(16), 48, GOOD.numbers | {"cfg_scale": 1.0})
    for job in (GOOD, FullJob(a_prompt(100), 60, GOOD.numbers), guided):
        [output] = generate(llm, [job.prompt], job.wish())
        assert token_ids(output) == job.decode(UNCACHED).answer()


def test_blocks_that_do_not_divide_the_context(room: EngineRoom) -> None:
    """The last canvas of 48 reaches to the end of the context of 160, which three do not."""
    llm = start(room, UNCACHED, max_num_batched_tokens=150)
    message = refusal(llm, [5], params(159, dllm_block_length=48))
    assert "160 positions" in message and "max_num_batched_tokens is 150" in message
    [output] = generate(llm, [[5]], params(97, dllm_block_length=48, dllm_steps=4))
    assert len(token_ids(output)) == 97


def test_guidance_leaves_the_watermark_free(room: EngineRoom) -> None:
    """Half of six pages is kept free of what enters beside a running request."""
    llm = start(room, UNCACHED, block_size=32, num_gpu_blocks_override=6, watermark=0.5)
    message = refusal(
        llm, a_prompt(16), params(48, dllm_cfg_scale=0.5, dllm_block_length=16)
    )
    assert "needs 4 pages" in message and "there are 2" in message
    job = FullJob(a_prompt(16), 16, GOOD.numbers | {"cfg_scale": 0.5})
    [output] = generate(llm, [job.prompt], job.wish())
    assert token_ids(output) == job.decode(UNCACHED).answer()
    llm = start(room, UNCACHED, block_size=32, num_gpu_blocks_override=6, watermark=0.9)
    assert "there are 0" in refusal(llm, job.prompt, job.wish())


@pytest.mark.parametrize("cfg_scale", [0.0, 0.5])
def test_streaming_input_ends_with_an_error(cfg_scale: float, room: EngineRoom) -> None:
    """Its second piece would be a text of its own; neighbours go on."""
    llm = start(room, UNCACHED)
    engine, tasks = llm.llm_engine, llm.llm_engine.get_supported_tasks()
    engine.add_request("good", {"prompt_token_ids": GOOD.prompt}, GOOD.wish())
    request = engine.input_processor.process_inputs(
        "pieces",
        {"prompt_token_ids": a_prompt(9)},
        params(16, dllm_cfg_scale=cfg_scale),
        supported_tasks=tasks,
        resumable=True,
    )
    core, outputs = engine.engine_core.engine_core, []
    core.add_request(*core.preprocess_add_request(request))
    for _ in range(40):
        outputs += [o for of in core.step()[0].values() for o in of.outputs]
    reasons = {output.request_id: str(output.finish_reason) for output in outputs}
    assert reasons.pop("pieces") == "error"
    assert list(reasons.values()) == ["length"]


def test_guidance_needs_two_places(room: EngineRoom) -> None:
    llm = start(room, UNCACHED, max_num_seqs=1)
    message = refusal(llm, a_prompt(9), params(8, dllm_cfg_scale=0.5))
    assert "cfg_scale needs two of max_num_seqs 1" in message
