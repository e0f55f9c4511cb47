"""Two ranks with new weights, and with adapters that requests choose: the tokens of one."""

from pathlib import Path
from typing import Any

import pytest
import weight_files
from engines import CHECKPOINTS, EngineRoom, a_prompt, generate, params, token_ids
from processes import HERE, KILLED_SOON, SETTINGS, offline
from safetensors.torch import load_file
from trained_adapters import merged, write_adapter
from trained_weights import trained

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

BASE, DLLM = CHECKPOINTS / "tiny-llada", {"strategy": "dual_cache"}
TEMPLATES = [[-1] * 9, [-1] * 5 + [70, 71] + [-1] * 6 + a_prompt(7, 2)]
JOBS = [(a_prompt(9 + 4 * i, i), TEMPLATES[i % 2]) for i in range(6)]


def end_of(template: list[int]) -> int:
    return len(template) - template[::-1].index(-1)


def wanted(room: EngineRoom, model: Path) -> list[list[int]]:
    """Tokens of one rank that started with these weights."""
    llm = room.start("llada", DLLM, model=str(model))
    wishes = [params(end_of(template), dllm_template=template) for _, template in JOBS]
    return [
        token_ids(one) for one in generate(llm, [prompt for prompt, _ in JOBS], wishes)
    ]


def on_two_ranks(**options: Any) -> dict[str, Any]:
    """A wish of :func:`processes.offline`."""
    engine = SETTINGS | {
        "model": str(BASE),
        "enforce_eager": True,
        "tensor_parallel_size": 2,
    }
    requests = [
        {
            "prompt": prompt,
            "params": {
                "max_tokens": end_of(template),
                "extra_args": {"dllm_template": template},
            },
        }
        for prompt, template in JOBS
    ]
    more = {"additional_config": {"dllm": DLLM}} | options
    return {"engine": engine | more, "requests": requests}


def test_gaps_under_new_weights_and_adapters(room: EngineRoom, tmp_path: Path) -> None:
    new = trained(BASE, tmp_path / "new")
    names = sorted(load_file(new / "model.safetensors"))
    file = str(new / "model.safetensors")
    updated = on_two_ranks(
        weight_transfer_config={"backend": weight_files.BACKEND},
        worker_extension_cls="weight_files.FromFiles",
    )
    updated["updates"] = [
        {"file": file, "names": half} for half in (names[::2], names[1::2])
    ]
    adapters = [
        write_adapter(tmp_path / f"a{n}", BASE, ["q_proj", "v_proj", "attn_out"], n)
        for n in (1, 2)
    ]
    adapted = on_two_ranks(enable_lora=True, max_loras=2, max_lora_rank=8)
    for place, request in enumerate(adapted["requests"]):
        if place % 3:
            request["adapter"] = str(adapters[place % 3 - 1])
    folders = [
        merged(tmp_path / f"m{n}" / BASE.name, BASE, one)
        for n, one in enumerate(adapters)
    ]
    of_base, of_new, *of_adapters = (wanted(room, one) for one in (BASE, new, *folders))
    room.close()
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    variables |= KILLED_SOON | {"PYTHONPATH": str(HERE)}
    found = offline(updated, adapted, **variables)
    assert found[0] == of_new != of_base
    mixed = [(of_base, *of_adapters)[place % 3][place] for place in range(len(JOBS))]
    assert found[1] == mixed
    assert mixed != of_base
