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
FULL, CHECKED = "semi_autoregressive", "llada2.1"
CASES = test_block_goldens.cases_of(CHECKED)


def numbers_of(one: Job) -> dict[str, Any]:
    return {"dllm_block_length": one.block_length} | {f"dllm_{k}": v for k, v in one.numbers}


def full_jobs() -> list[FullJob]:
    """Full attention, one of them guided."""
    jobs = [
        FullJob(a_prompt(9 + 11 * i, i), 40 + 8 * i, {"policy": policy, "block_length": 16})
        for i, policy in enumerate(("threshold", "entropy", "factor"))
    ]
    jobs[1].numbers["cfg_scale"] = 0.6
    return jobs


def on_two_ranks(
    name: str, config: dict[str, Any], requests: list[tuple[list[int], dict[str, Any]]], **more: Any
) -> dict[str, Any]:
    """A wish of :func:`processes.offline`."""
    engine = SETTINGS | {"model": str(CHECKPOINTS / f"tiny-{name}"), "enforce_eager": True}
    engine |= {"tensor_parallel_size": 2, "additional_config": config} | more
    # Registering by hand beside the entry point is harmless.
    wants = [{"prompt": prompt, "params": given} for prompt, given in requests]
    return {"engine": engine, "requests": wants, "register": name == "dream"}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[int]]]:
    """Tokens of four engines, which one script starts after each other."""
    mixed = [
        (list(j.prompt), {"max_tokens": j.max_tokens, "extra_args": numbers_of(j)}) for j in MIXED
    ]
    full = [
        (j.prompt, {"max_tokens": j.max_tokens, "extra_args": x})
        for j in full_jobs()
        for x in [{f"dllm_{k}": v for k, v in j.numbers.items()}]
    ]
    fields = ("max_tokens", "extra_args", "stop_token_ids")
    checked = [
        (case["prompt_ids"], {field: getattr(wish, field) for field in fields})
        for case in CASES
        for wish in [test_block_goldens.wish(case)]
    ]
    canvas = {"dllm": {"strategy": FULL, "canvas_length": 48, "vocab_parallel": True}}
    columns = {"dllm": D2F["dllm"] | {"vocab_parallel": True}}
    # One request needs whole rows while it runs, and the others none behind it.
    some_whole = [*mixed]
    some_whole[1] = (mixed[1][0], mixed[1][1] | {"logprobs": 1})
    wishes = {
        "llada": on_two_ranks("llada", D2F, mixed),
        "dream": on_two_ranks("dream", columns, some_whole),
        FULL: on_two_ranks("llada", canvas, full, max_model_len=CONTEXT),
        CHECKED: on_two_ranks(CHECKED, {"dllm": {"canvas_length": 64}}, checked),
    }
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return dict(zip(wishes, offline(*wishes.values(), **variables), strict=True))


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_tensor_parallel(name: str, answers: dict[str, list[list[int]]]) -> None:
    """LLaDA's ranks gather logits, Dream's exchange results per row."""
    assert answers[name] == [j.expected(name)[0] for j in MIXED]


def test_tensor_parallel_full_attention(answers: dict[str, list[list[int]]]) -> None:
    """Each rank finds the same rows for its share of the LM head; guided pairs too.

    What a rank computes stays there: ranks exchange results per row.
    """
    assert answers[FULL] == [job.decode(("llada", FULL)).answer() for job in full_jobs()]


def test_tensor_parallel_blocks(answers: dict[str, list[list[int]]]) -> None:
    """Two ranks share each expert of a mixture; blocks are checked, edited and stored alike."""
    assert answers[CHECKED] == [case["output_ids"] for case in CASES]


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
