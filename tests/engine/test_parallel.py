"""Two ranks give the tokens of one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import test_block_goldens
from engines import CHECKPOINTS, a_prompt
from full_jobs import CONTEXT, FullJob
from jobs import MIXED, Job
from processes import SETTINGS, offline, serving

D2F = {"dllm": {"strategy": "d2f"}}


def numbers_of(one: Job) -> dict[str, Any]:
    return {"dllm_block_length": one.block_length} | {f"dllm_{k}": v for k, v in one.numbers}


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_tensor_parallel(name: str) -> None:
    engine = SETTINGS | {"model": str(CHECKPOINTS / f"tiny-{name}"), "enforce_eager": True}
    engine |= {"tensor_parallel_size": 2, "additional_config": D2F}
    requests = [
        {"prompt": list(j.prompt), "params": {"max_tokens": j.max_tokens, "extra_args": x}}
        for j in MIXED
        for x in [numbers_of(j)]
    ]
    # Registering by hand beside the entry point is harmless.
    wish = {"engine": engine, "requests": requests, "register": name == "dream"}
    tokens = offline(wish, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert tokens == [j.expected(name)[0] for j in MIXED]


def test_tensor_parallel_full_attention() -> None:
    """Each rank finds the same rows for its share of the LM head; guided pairs too."""
    name, strategy = "llada", "semi_autoregressive"
    jobs = [
        FullJob(a_prompt(9 + 11 * i, i), 40 + 8 * i, {"policy": policy, "block_length": 16})
        for i, policy in enumerate(("threshold", "entropy", "factor"))
    ]
    jobs[1].numbers["cfg_scale"] = 0.6
    engine = SETTINGS | {"model": str(CHECKPOINTS / f"tiny-{name}"), "enforce_eager": True}
    config = {"dllm": {"strategy": strategy, "canvas_length": 48}}
    engine |= {"tensor_parallel_size": 2, "additional_config": config, "max_model_len": CONTEXT}
    requests = [
        {"prompt": job.prompt, "params": {"max_tokens": job.max_tokens, "extra_args": x}}
        for job in jobs
        for x in [{f"dllm_{k}": v for k, v in job.numbers.items()}]
    ]
    wish = {"engine": engine, "requests": requests, "register": False}
    tokens = offline(wish, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert tokens == [job.decode((name, strategy)).answer() for job in jobs]


def test_data_parallel(tmp_path: Path) -> None:
    """Both engines take part, and each answers as a single one."""
    options = ("--data-parallel-size=2", '--additional-config={"dllm": {"strategy": "d2f"}}')
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(tmp_path / "log", *options, **variables) as server:

        def ask(one: Job) -> list[int]:
            answer = server.complete(
                list(one.prompt),
                max_tokens=one.max_tokens,
                ignore_eos=True,
                return_token_ids=True,
                vllm_xargs=numbers_of(one),
            )
            return list(answer["choices"][0]["token_ids"])

        with ThreadPoolExecutor(8) as pool:
            tokens = list(pool.map(ask, MIXED))
        steps = server.metrics("vllm:diffusion_num_denoising_steps_total")
    assert tokens == [j.expected("llada")[0] for j in MIXED]
    assert sorted(steps) == ["0", "1"]
    assert min(steps.values()) > 0


def test_tensor_parallel_blocks() -> None:
    """Two ranks share each expert of a mixture; blocks are checked, edited and stored alike."""
    name = "llada2.1"
    cases = test_block_goldens.cases_of(name)
    engine = SETTINGS | {"model": str(CHECKPOINTS / f"tiny-{name}"), "enforce_eager": True}
    engine |= {"tensor_parallel_size": 2, "additional_config": {"dllm": {"canvas_length": 64}}}
    requests = []
    for case in cases:
        wish = test_block_goldens.wish(case)
        given = {"max_tokens": wish.max_tokens, "extra_args": wish.extra_args}
        given["stop_token_ids"] = wish.stop_token_ids
        requests.append({"prompt": case["prompt_ids"], "params": given})
    tokens = offline({"engine": engine, "requests": requests}, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert tokens == [case["output_ids"] for case in cases]
