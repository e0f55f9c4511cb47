"""Pages that vLLM's offloading connector stores and loads: the same tokens, only final pages."""

from pathlib import Path
from typing import Any

import host_copy
import pytest
from engines import (
    CHECKPOINTS,
    EngineRoom,
    a_prompt,
    free_pages,
    generate,
    letters,
    params,
    scheduler,
    token_ids,
)
from test_stages_families import STAGES
from test_weight_updates import TRANSFER, halves, send
from trained_weights import trained
from vllm.v1.core.sched.interface import PauseState

pytestmark = [pytest.mark.usefixtures("template", "workers_end_soon"), pytest.mark.slow]

PAGE = 32
EXTRA = {
    "cpu_bytes_to_use": 64 << 20,
    "spec_name": "HostCopySpec",
    "spec_module_path": "host_copy",
}
# The default of A2D computes prompts again in every step.
DLLM = {"a2d-qwen3": {"strategy": "block_diffusion"}}
LENGTHS = (1, 9, 31, 32, 33, 40, 64, 97, 160, 200)


def transfer(name: str, **extra: Any) -> dict[str, Any]:
    """Return the option for a connector."""
    kind = {"kv_connector": name, "kv_role": "kv_both"}
    return {"kv_transfer_config": kind | {"kv_connector_extra_config": extra}}


def start(
    room: EngineRoom, model: str, overlapped: bool, **extra: Any
) -> tuple[Any, list[int], list[int]]:
    """Return an engine whose pages are found by the connector only, and counts of pages."""
    options = transfer("OffloadingConnector", **EXTRA, **extra)
    llm = room.start(
        model,
        DLLM.get(model, {}),
        async_scheduling=overlapped,
        enable_prefix_caching=False,
        **options,
    )
    host_copy.STORED.clear()
    host_copy.LOADED.clear()
    return llm, host_copy.STORED, host_copy.LOADED


def answers(llm: Any, prompts: list[list[int]], tokens: int = 40) -> list[list[int]]:
    return [token_ids(output) for output in generate(llm, prompts, params(tokens))]


def pages_not_used(llm: Any) -> int:
    """Return the number of free pages, and of those that are free after the next step."""
    deferred = scheduler(llm).deferred_frees
    return free_pages(llm) + sum(len(pages) for _, pages in deferred)


def take_steps(llm: Any) -> None:
    """Take steps in which stores of ended requests are submitted and end."""
    answers(llm, [[7]], 8)


@pytest.mark.parametrize(
    ("model", "overlapped"),
    [
        ("sdar", False),
        ("sdar", True),
        ("sdar-moe", True),
        ("llada2.1", True),
        ("llada2.2", True),
        ("stable-diffcoder", True),
        ("fast-dllm-v2", True),
        ("nemotron", True),
        ("idlm", True),
        ("wedlm", True),
        ("a2d-qwen3", True),
    ],
)
def test_prompts_are_loaded(model: str, overlapped: bool, room: EngineRoom) -> None:
    """Whole pages of prompts are stored once, and loaded by the second request.

    Blocks of LLaDA2.2, which share experts, are as long as a page: a prompt of one page is
    computed again.
    """
    llm, stored, loaded = start(room, model, overlapped)
    prompts = [letters(length, length) for length in LENGTHS]
    pages = pages_not_used(llm)
    first = answers(llm, prompts)
    whole = sum(length // PAGE for length in LENGTHS)
    assert not loaded
    assert answers(llm, prompts) == first
    take_steps(llm)
    assert (len(stored), len(loaded)) == (whole, whole)
    assert pages_not_used(llm) == pages


def test_stages_load_prompts(room: EngineRoom) -> None:
    """Each stage stores and loads the pages of its layers."""
    options = transfer("OffloadingConnector", **EXTRA) | STAGES
    llm = room.start(
        "sdar", {}, async_scheduling=True, enable_prefix_caching=False, **options
    )
    prompts = [a_prompt(length, length) for length in LENGTHS]
    first = answers(llm, prompts)
    assert answers(llm, prompts) == first
    hits = [m for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"]
    whole = sum(length // PAGE for length in LENGTHS)
    assert [metric.value for metric in hits] == [PAGE * whole]


def chats(llm: Any, turns: int) -> list[list[list[int]]]:
    """Return the answers of eight chats, whose turns bring everything so far."""
    texts = [a_prompt(12 + 5 * i, i) for i in range(8)]
    said = []
    for turn in range(turns):
        said.append(answers(llm, texts, 52))
        texts = [
            text + answer + a_prompt(3, turn)
            for text, answer in zip(texts, said[-1], strict=True)
        ]
    return said


def test_chats_are_loaded(overlapped: bool, room: EngineRoom) -> None:
    """Pages of generated text too; but never the page in which a text ended."""
    plain = chats(room.start("sdar", {}, enable_prefix_caching=False), 3)
    llm, stored, loaded = start(room, "sdar", overlapped, offload_prompt_only=False)
    assert chats(llm, 3) == plain
    assert len(loaded) > 8 and len(stored) > 16
    take_steps(llm)
    stored.clear()
    answers(llm, [a_prompt(20, 77)], 2 * PAGE - 20)  # ends where a page ends
    take_steps(llm)
    assert len(stored) == 1


@pytest.mark.parametrize("model", ["sdar", "a2d-qwen3"])
def test_aborted_texts_are_loaded(
    model: str, overlapped: bool, room: EngineRoom
) -> None:
    """Pages of a request that is aborted while it decodes are final, too.

    Blocks of A2D end where the prompt ends: the next prompt ends as far into a page.
    """
    llm, _, loaded = start(room, model, overlapped, offload_prompt_only=False)
    longer = []
    for steps in range(3, 40, 3):
        text = prompt = a_prompt(50, steps)
        engine, name = llm.llm_engine, f"ends after {steps} steps"
        engine.add_request(name, {"prompt_token_ids": prompt}, params(150))
        for _ in range(steps):
            for output in engine.step():
                text = prompt + token_ids(output)
        engine.abort_request([name])
        while engine.has_unfinished_requests():
            engine.step()
        more = PAGE - (len(text) - len(prompt)) % PAGE
        longer.append(text + a_prompt(more, steps))
    assert max(map(len, longer)) > 2 * PAGE
    given = answers(llm, longer)
    assert len(loaded) >= len(longer)
    plain = room.start(model, DLLM.get(model, {}), enable_prefix_caching=False)
    assert given == answers(plain, longer)


@pytest.mark.parametrize("connector", [False, True], ids=["cache", "connector"])
def test_frozen_requests_leave_no_pages_of_old_weights(
    connector: bool, overlapped: bool, room: EngineRoom, tmp_path: Path
) -> None:
    """A paused server has no step in flight, and computes frozen requests again."""
    new, prompt = trained(CHECKPOINTS / "tiny-sdar", tmp_path), letters(100)
    [wanted] = answers(room.start("sdar", {}, model=str(new)), [prompt])
    options = transfer("OffloadingConnector", **EXTRA) if connector else {}
    options |= {"enable_prefix_caching": True, "block_size": PAGE}
    llm = room.start("sdar", {}, async_scheduling=overlapped, **options, **TRANSFER)
    engine = llm.llm_engine
    engine.add_request("frozen", {"prompt_token_ids": prompt}, params(90))
    for _ in range(8):
        engine.step()
    core = engine.engine_core.engine_core
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.batch_queue:
        engine.step()
    core.pause_scheduler("keep", True)
    send(llm, new, *halves(new))
    core.resume_scheduler()
    while engine.has_unfinished_requests():
        engine.step()
    take_steps(llm)
    [output] = generate(llm, [prompt], params(40))
    assert token_ids(output) == wanted
    assert output.num_cached_tokens == 3 * PAGE


AFTER = "its keys and values depend on text after their page"
OFFLOADING = transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20)
ALL_TEXT = transfer(
    "OffloadingConnector", cpu_bytes_to_use=1 << 20, offload_prompt_only=False
)


@pytest.mark.parametrize(
    ("model", "dllm", "options", "sentence"),
    [
        ("llada", {"strategy": "dual_cache"}, OFFLOADING, AFTER),
        ("llada", {"strategy": "dual_cache"}, {"kv_offloading_size": 1}, AFTER),
        ("dream", {"strategy": "d2f"}, OFFLOADING, AFTER),
        ("a2d-qwen3", {}, OFFLOADING, AFTER),
        ("sdar", {}, transfer("ExampleConnector"), "kv_connector ExampleConnector"),
        ("sdar", {}, transfer("LMCacheConnectorV1"), "kv_connector LMCacheConnectorV1"),
        (
            "sdar",
            {},
            transfer("MultiConnector"),
            "Take OffloadingConnector or NixlConnector.",
        ),
        (
            "sdar",
            {},
            {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
            "kv_connector LMCacheMPConnector",
        ),
        (
            "sdar",
            {"block_length": 24, "canvas_length": 48},
            transfer("OffloadingConnector", **EXTRA)
            | {"block_size": 32, "enable_prefix_caching": False},
            "block_size 32 is no multiple of block_length 24: leave block_size out",
        ),
        (
            "sdar",
            {},
            transfer("NixlConnector", bidirectional_kv_xfer=True),
            "kv_connector NixlConnector cannot be combined with bidirectional_kv_xfer",
        ),
        ("dream", {"strategy": "d2f"}, transfer("NixlConnector"), AFTER),
        (
            "sdar",
            {"adaptive": "throughput"},
            ALL_TEXT,
            "offload_prompt_only False cannot be combined with adaptive",
        ),
    ],
)
def test_refused(
    model: str,
    dllm: dict[str, Any],
    options: dict[str, Any],
    sentence: str,
    room: EngineRoom,
) -> None:
    with pytest.raises(ValueError) as caught:
        room.start(model, dllm, **options)
    assert sentence in str(caught.value)
