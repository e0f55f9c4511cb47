"""Cascade attention of floating canvases: the context once, then run, window and rest."""

import random
from pathlib import Path

import torch
from scripted import Loop, sampling
from scripted_rows import Hashed
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.worker.utils import AttentionGroup

from dllm_plugin.attention.cascade import cascade_from
from dllm_plugin.attention.flash import SegmentFlashBackend, SegmentFlashBuilder
from dllm_plugin.attention.kv_groups import KVGroups
from dllm_plugin.attention.sequences import AttentionSequences

SPEC = FullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
)


def test_where_it_is_taken(checkpoints: Path) -> None:
    """The second reading has to save more than a launch and a merge of the width take."""
    dllm = {
        "adaptive": "throughput",
        "block_length": 32,
        "canvas_length": 96,
        "strategy": "d2f",
    }
    options = {"dtype": "bfloat16", "additional_config": {"dllm": dllm}}
    config = EngineArgs(
        str(checkpoints / "tiny-llada"), **options
    ).create_engine_config()
    config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
    model = config.model_config
    heads = model.get_num_kv_heads(config.parallel_config)
    assert heads == model.get_num_attention_heads(config.parallel_config)
    model.hf_text_config.head_dim = model.model_arch_config.head_size = 4096 // heads
    found = cascade_from(config, 3)
    assert [found[width] for width in (2, 8, 16, 32)] == [6, 6, 7, 9]
    assert min(found) == 2 and max(found) < 80
    assert not cascade_from(config, 2)


def test_floating_canvases_in_a_cascade(checkpoints: Path) -> None:
    """Run, parts of the window and rest of each width, in graphs with padding and without."""
    config = EngineArgs(
        str(checkpoints / "tiny-sdar"), dtype="bfloat16"
    ).create_engine_config()
    builder = SegmentFlashBuilder(SPEC, ["x"], config, torch.device("cpu"))
    dice = random.Random(7)
    group = AttentionGroup(
        SegmentFlashBackend, ["x"], SPEC, 0, metadata_builders=[builder]
    )
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["x"], SPEC)])
    dllm = {
        "strategy": "d2f",
        "adaptive": "throughput",
        "block_length": 4,
        "canvas_length": 12,
    }
    loop = Loop(dllm)
    runs = [loop.start([1] * n, Hashed(n), sampling(40, None)) for n in (3, 9, 17, 2)]
    loop.step()
    both = AttentionSequences(
        loop.states, 4, 64, cascade_from=dict.fromkeys(range(2, 13), 2)
    )
    for _ in range(40):
        width, count, full = (
            dice.randint(2, 12),
            dice.randint(2, 4),
            dice.random() < 0.5,
        )
        for canvas in loop.states.canvas_NC:
            decided = torch.rand(12) < dice.random()
            canvas.copy_(torch.where(decided, 1, loop.mask))
        batch = loop.batch(dice.sample(runs, count), [width] * count, [])
        padded = dice.randint(count, 4) if full else count
        batch.num_reqs_after_padding, batch.num_tokens_after_padding = (
            padded,
            padded * width,
        )
        bounds = [min(i, count) * width for i in range(padded + 1)]
        batch.query_start_loc = torch.tensor(bounds, dtype=torch.int32)
        batch.query_start_loc_np = batch.query_start_loc.numpy()
        batch.seq_lens = torch.nn.functional.pad(
            batch.seq_lens, (0, padded - count)
        ).int()
        tables = (torch.arange(4 * padded, dtype=torch.int32).view(padded, 4),)
        mode = CUDAGraphMode.FULL if full else CUDAGraphMode.NONE
        slots = torch.zeros(1, padded * width).long()
        groups = KVGroups(64, batch.positions, tables, slots, [[group]], cache)
        step = (batch, groups, mode, False)
        plain = AttentionSequences(loop.states, 4, 64).build(*step)["x"]
        cascade = both.build(*step)["x"]
        suffix = cascade.canvas_suffix
        assert plain.canvas_suffix is None and suffix is not None
        assert suffix.length == width and cascade.num_actual_tokens == padded * width
        assert suffix.start_loc.tolist() == plain.query_start_loc.tolist()
        used, request = (
            plain.query_start_loc.diff() > 0,
            suffix.request.squeeze(1).long(),
        )
        seen = cascade.seq_lens[request] + suffix.keys
        assert seen[used].tolist() == plain.seq_lens[used].tolist()
        assert torch.equal(cascade.block_table[request], plain.block_table)
        assert suffix.keys.min() >= 0 and suffix.keys.max() <= width
        assert (
            not cascade.seq_lens[count:].any()
            and cascade.query_start_loc.tolist() == bounds
        )
    # Neither with widths of their own, nor with prompts, nor so few.
    single = loop.batch(runs[:1], [4], [])
    mixed = loop.batch(runs[:2], [4, 6], [])
    for batch in (single, mixed):
        slots = torch.zeros(1, 10).long()
        groups = KVGroups(64, batch.positions, tables, slots, [[group]], cache)
        step = (batch, groups, CUDAGraphMode.NONE)
        assert both.build(*step, False)["x"].canvas_suffix is None
