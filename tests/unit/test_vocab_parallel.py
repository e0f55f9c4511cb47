"""Compare ranks that hold columns of the logits with one rank that holds whole rows."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Loop, sampling
from scripted_rows import VOCAB, Hashed
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs

from dllm_plugin.kernels.confidence.reference import Columns
from dllm_plugin.sampling.rows import VocabShard

D2F = {
    "strategy": "d2f",
    "block_length": 4,
    "canvas_length": 16,
    "max_active_blocks": 4,
}
BLOCK = {"strategy": "block_diffusion", "block_length": 4, "canvas_length": 8}
Wants = list[dict[str, Any]]


class Exchange:
    """Exchange tensors between ranks that are threads of this process; each waits for all."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.tensors: list[Any] = [None] * ranks
        self.calls: list[list[str]] = [[] for _ in range(ranks)]

    def __call__(self, rank: int, kind: str, tensor: Tensor) -> list[Tensor]:
        self.calls[rank].append(kind)
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        gathered = list(self.tensors)
        self.barrier.wait()
        return gathered


class ThreadShard(VocabShard):
    """Gather over ranks that are threads."""

    def __init__(self, rank: int, ranks: int, exchange: Exchange) -> None:
        self.rank, self.all = rank, exchange
        self.width = -(-VOCAB // ranks) + 1
        self.columns = Columns(rank * self.width, VOCAB, ranks)

    def gather_partials(self, partials_KTP: Tensor) -> Tensor:
        return torch.stack(self.all(self.rank, "partials", partials_KTP))

    def gather_rows(self, logits_TV: Tensor) -> Tensor:
        return torch.cat(self.all(self.rank, "rows", logits_TV), dim=1)[:, :VOCAB]


def text_of(
    dllm: dict[str, Any], shift: bool, wants: Wants, shard: Any = None
) -> list[Any]:
    """Return what requests that run together emit, step by step."""
    loop = Loop(dllm, shift, shard=shard)
    runs = []
    for seed, want in enumerate(wants):
        options = {k: v for k, v in want.items() if k != "words"}
        params = sampling(20 if want in PLAIN else 8, None, seed=seed, **options)
        params._bad_words_token_ids = want.get("words")
        runs.append(loop.start([seed + 1] * (seed % 3 + 1), Hashed(seed), params))
    loop.run()
    return [(run.output, run.passes) for run in runs]


PLAIN: Wants = [
    {},
    {"temperature": 0.8},
    {"temperature": 2.0, "dllm_block_length": 2},
    {"logit_bias": {3: 1.5, 9: -40.0}},
    {"temperature": 0.5, "allowed_token_ids": [2, 5, 8, 11]},
]
WHOLE: dict[str, Wants] = {
    "nothing": [],
    "filters": [
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.5, "min_p": 0.2},
    ],
    "logprobs": [{"logprobs": 2}],
    "penalties": [
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"frequency_penalty": 1.0, "temperature": 0.7},
    ],
    "rules": [{"min_tokens": 6, "stop_token_ids": [4, 7]}, {"words": [[3, 5], [6]]}],
}


@pytest.mark.parametrize("extra", WHOLE)
@pytest.mark.parametrize(("shift", "ranks"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("dllm", [D2F, BLOCK], ids=["d2f", "block_diffusion"])
def test_ranks_decide_as_one(
    dllm: dict[str, Any], shift: bool, ranks: int, extra: str
) -> None:
    """Whole rows are gathered while a request that needs them runs, and no longer."""
    wants, exchange = PLAIN + WHOLE[extra], Exchange(ranks)
    shards = [ThreadShard(rank, ranks, exchange) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        texts = list(pool.map(lambda shard: text_of(dllm, shift, wants, shard), shards))
    assert texts == [text_of(dllm, shift, wants)] * ranks
    assert exchange.calls == [exchange.calls[0]] * ranks
    assert set(exchange.calls[0]) == (
        {"partials", "rows"} if WHOLE[extra] else {"partials"}
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"enable_lora": True},
            "columns of the LM head apart, which enable_lora gathers",
        ),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size of at least 2, got 1"),
    ],
    ids=["lora", "one rank"],
)
def test_what_it_cannot_serve(
    given: dict[str, Any], sentence: str, checkpoints: Path
) -> None:
    options = {
        "tensor_parallel_size": 2,
        "additional_config": {"dllm": {"vocab_parallel": True}},
    }
    arguments = EngineArgs(str(checkpoints / "tiny-sdar"), **options | given)
    with pytest.raises(ValueError, match=sentence):
        arguments.create_engine_config()


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        ({}, True),
        ({"additional_config": {"dllm": {"vocab_parallel": False}}}, False),
        ({"enable_lora": True}, False),
        ({"tensor_parallel_size": 1}, False),
    ],
    ids=["ranks", "refused", "lora", "one rank"],
)
def test_columns_stay_apart_by_default(
    given: dict[str, Any], columns: bool, checkpoints: Path
) -> None:
    arguments = EngineArgs(
        str(checkpoints / "tiny-sdar"), **{"tensor_parallel_size": 2} | given
    )
    config = arguments.create_engine_config()
    assert config.additional_config["dllm"]["vocab_parallel"] is columns
