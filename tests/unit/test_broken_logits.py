"""Logits that are NaN or infinite are counted for their request, whoever reads them."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Loop, Run, sampling
from scripted_rows import VOCAB, Table
from surface import arguments, fields_of, found_in_vllm
from torch import Tensor

from dllm_plugin.attention import kv_groups as pages
from dllm_plugin.config.worker_carriers import FINISHED, pack_id, unpack_id

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
BLOCK = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}
SURE = Table(lambda q: q % 13, lambda q: 0.99)
ASKS: list[dict[str, Any]] = [  # one read of the logits, and what needs copies of them
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 3, "min_p": 0.1},
    {"logprobs": 2},
    {"min_tokens": 3},
    {"dllm_policy": "entropy"},
]


def rows(value: float, tokens: slice = slice(None)) -> Any:
    """A model whose logits of some tokens are no numbers."""

    def script(visible: list[int], position: int) -> np.ndarray:
        row = np.zeros(VOCAB, dtype=np.float32)
        row[tokens] = value
        return row

    return script


def run_pair(script: Any, dllm: dict[str, Any], **asks: Any) -> tuple[Run, Run]:
    loop = Loop(dllm)
    run = loop.start([1], script, sampling(8, **asks), req_id="broken")
    other = loop.start([1] * 4, SURE, sampling(8), req_id="healthy")
    loop.run()
    return run, other


@pytest.mark.parametrize("asks", ASKS, ids=str)
@pytest.mark.parametrize("dllm", [D2F, BLOCK], ids=["d2f", "block"])
def test_broken_rows_are_counted(dllm: dict[str, Any], asks: dict[str, Any]) -> None:
    """And stop neither the request, which the scheduler ends, nor its neighbours."""
    scripts = [
        rows(np.nan),
        rows(np.nan, slice(7, 8)),
        rows(np.inf, slice(7, 8)),
        rows(-np.inf),
    ]
    for script in scripts:
        run, other = run_pair(script, dllm, **asks)
        assert run.broken > 0 and len(run.output) == 8
        assert other.broken == 0 and other.output == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("asks", ASKS, ids=str)
def test_no_id_is_left(asks: dict[str, Any]) -> None:
    """Banned ids, the request's own doing, are no fault; nor is an id that a model rules out."""
    run, _ = run_pair(rows(-np.inf, slice(1, 16)), D2F, allowed_token_ids=[5], **asks)
    assert run.broken == 0 and len(run.output) == 8
    run, _ = run_pair(rows(-np.inf, slice(3, 16)), D2F, **asks)
    assert run.broken == 0


def test_an_infinite_row_beside_good_ones() -> None:
    """One position of a block is enough, in each of its steps."""

    def script(visible: list[int], position: int) -> np.ndarray:
        row = SURE(visible, position)
        return np.full_like(row, np.inf) if position == 6 else row

    run, _ = run_pair(script, D2F)
    assert run.broken in (1, 2)


def test_the_pages_travel_with_the_id() -> None:
    sent = pack_id("a", FINISHED, (3, 5))
    got = pickle.loads(pickle.dumps({sent}))
    assert got == {"a"} and [unpack_id(i) for i in got] == [(FINISHED, (3, 5))]


def test_pages_are_cleared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages, also where kernels cut them in two; NaN too."""
    caches: list[Tensor] = [torch.full((n, 2, 4, 6), float("nan")) for n in (8, 16)]
    layers = {str(i): SimpleNamespace(kv_cache=cache) for i, cache in enumerate(caches)}
    monkeypatch.setattr(pages, "get_layers_from_vllm_config", lambda *_: layers)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=8))
    pages.clear_pages(config, (2, 7), torch.device("cpu"))
    for cache, cut in zip(caches, (1, 2), strict=True):
        zero = [bool((row == 0).all()) for row in cache]
        assert zero == [i // cut in (2, 7) for i in range(8 * cut)]
        assert all(
            bool(row.isnan().all()) for row, z in zip(cache, zero, strict=True) if not z
        )


def test_what_the_scheduler_asks_of_vllm() -> None:
    manager = "v1.core.kv_cache_manager:KVCacheManager."
    assert arguments(found_in_vllm(manager + "evict_blocks")) == "self block_ids"
    assert arguments(found_in_vllm(manager + "get_block_ids")) == "self request_id"
    assert {"ref_cnt", "is_null"} <= fields_of(
        found_in_vllm("v1.core.kv_cache_utils:KVCacheBlock")
    )
    assert {"num_nans_in_logits"} <= fields_of(
        found_in_vllm("v1.engine:EngineCoreOutput")
    )
