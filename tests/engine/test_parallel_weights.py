"""Two ranks with new weights, and with adapters that requests choose: the tokens of one.

What ranks refuse reaches the call that asked for it, and no later one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import weight_files
from engines import CHECKPOINTS, EngineRoom, a_prompt, generate, params, token_ids
from processes import HERE, KILLED_SOON, SETTINGS, offline
from safetensors.torch import load_file
from test_stages_families import STAGES
from test_weight_updates import Q_PROJ, send, tokens, write
from trained_adapters import merged, write_adapter
from trained_weights import trained
from vllm.lora.request import LoRARequest

from dllm_plugin.engine.worker.ranks import fail_together

pytestmark = [
    pytest.mark.usefixtures("template", "workers_end_soon"),
    pytest.mark.slow,
]

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


RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
SDAR = CHECKPOINTS / "tiny-sdar"


def refused_on(worker: Any, rank: int) -> None:
    """A call of all ranks that one of them refuses."""

    @fail_together
    def call(worker: Any) -> None:
        if worker.rank == rank:
            raise ValueError(f"rank {rank} has no room")

    call(worker)


@pytest.mark.parametrize("several", [STAGES, RANKS], ids=["stages", "ranks"])
def test_a_refusal_reaches_its_own_call(
    several: dict[str, Any], room: EngineRoom, tmp_path: Path
) -> None:
    """vLLM reads the first error, and would find the replies of later ranks in the next call."""
    llm = room.start(
        "sdar",
        {},
        async_scheduling=True,
        weight_transfer_config={"backend": weight_files.BACKEND},
        worker_extension_cls="weight_files.FromFiles",
        enable_lora=True,
        max_lora_rank=8,
        **several,
    )
    engine, before = llm.llm_engine, tokens(llm)
    other = {"base_model_name_or_path": "a/other"}
    wrong = write_adapter(tmp_path / "wrong", SDAR, ["q_proj"], 1, **other)
    update = write(tmp_path / "update", {Q_PROJ: torch.zeros(3, 2)})
    refusals = [
        ("was trained on 'a/other'", engine.add_lora, (adapter("wrong", 1, wrong),)),
        (f"Weight '{Q_PROJ}' in the update has shape", send, (llm, update, [])),
        ("finish the update first", while_updating, (llm, "reload_weights")),
        ("Cannot release", while_updating, (llm, "shutdown_weight_transfer_engine")),
        ("meta tensor", while_updating, (llm, "compute_weight_checksums")),
        ("77", engine.pin_lora, (77,)),
        ("No such file", updated_in_part, (llm, 0)),
        ("No such file", updated_in_part, (llm, 1)),
        ("Profiling is not enabled", llm.start_profile, ()),
        ("no draft model is", llm.collective_rpc, ("start_draft_weight_update",)),
        ("Selective discard", llm.collective_rpc, ("discard", None, (("kv_cache",),))),
        ("rank 0 has no room", llm.collective_rpc, (refused_on, None, (0,))),
        ("rank 1 has no room", llm.collective_rpc, (refused_on, None, (1,))),
    ]
    for sentence, call, arguments in refusals:
        with pytest.raises(RuntimeError, match=sentence):
            call(*arguments)
        assert tokens(llm) == before, sentence
        llm.reset_prefix_cache()
    right = write_adapter(tmp_path / "right", SDAR, ["q_proj", "up_proj"], 1)
    assert engine.add_lora(adapter("right", 2, right))
    new = trained(SDAR, tmp_path / "new")
    send(llm, new, [])
    llm.reset_prefix_cache()
    found = tokens(llm)
    assert found != before
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(SDAR)})
    llm.reset_prefix_cache()
    assert tokens(llm) == before
    assert found == tokens(room.start("sdar", {}, model=str(new)))


def adapter(name: str, number: int, folder: Path) -> LoRARequest:
    return LoRARequest(name, number, str(folder))


def while_updating(llm: Any, method: str) -> None:
    """A call that an open update refuses; the update ends without a part."""
    llm.start_weight_update()
    try:
        llm.collective_rpc(method)
    finally:
        llm.finish_weight_update()


def updated_in_part(llm: Any, rank: int) -> None:
    """An update of which one rank cannot read its file; the other ranks have read theirs."""
    files = [{"file": str(SDAR / "model.safetensors")}] * 2
    files[rank] = {"file": "/no/such/file"}
    llm.start_weight_update()
    llm.update_weights({"update_info": files})
