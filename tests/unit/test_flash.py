"""FlashAttention under full CUDA graphs: sizes of its buffers, and when it is taken."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flash_configs import SPEC, builder_of, config_with_graphs
from scripted import Loop, Run, sampling
from scripted_rows import Hashed
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup

from dllm_plugin.attention.cascade import CascadeBuffers
from dllm_plugin.attention.flash import (
    SPLIT_TOKENS,
    SegmentFlashBackend,
    SegmentFlashMetadata,
    schedule_size,
)
from dllm_plugin.attention.kv_groups import KVGroups
from dllm_plugin.attention.prefills import max_sequences, sequences_per_canvas
from dllm_plugin.attention.sequences import AttentionSequences, batch_sequences
from dllm_plugin.config.decode import get_decode_config

FAMILIES: list[dict[str, Any]] = [
    {"strategy": "d2f", "block_length": 4, "max_active_blocks": 4, "canvas_length": 16},
    {"strategy": "d2f", "block_length": 2, "max_active_blocks": 9, "canvas_length": 6},
    {"strategy": "block_diffusion", "block_length": 4},
    {"strategy": "block_diffusion", "block_length": 2, "max_active_blocks": 4},
    {"strategy": "dual_cache", "block_length": 4, "canvas_length": 16},
]


@pytest.fixture
def engine_config(checkpoints: Path) -> VllmConfig:
    return config_with_graphs(checkpoints)


def random_batches(dllm: dict[str, Any], seed: int) -> list[tuple[Loop, InputBatch]]:
    """Steps with canvases in any phase beside prompts and texts that come back from preemption."""
    dice = random.Random(seed)
    loop, batches = Loop(dllm), []
    for _ in range(6):
        while loop.free and dice.random() < 0.7:
            # The whole canvas of full attention is one block.
            whole = loop.config.method.full_attention
            length = {} if whole else {"dllm_block_length": dice.randint(1, 6)}
            wish = sampling(dice.randint(1, 40), None, **length)
            prompt = [1] * dice.randint(1, 20)
            run = loop.start(
                prompt, Hashed(seed), wish, f"request-{len(batches)}-{dice.random()}"
            )
            # On an absolute grid a prompt has as many sequences as blocks.
            loop.states.requests.origin.np[run.slot] = dice.choice([0, len(prompt)])
        if not loop.running:
            continue
        batches.append((loop, batch_of(loop, loop.running)))
        sequences = batch_sequences(batches[-1][1], loop.states)
        check_sequences(loop, batches[-1][1], len(sequences.length_B))
        assert (sequences.length_B > 0).all()
        if loop.config.method.full_attention:
            break  # its forwards are planned by the scheduler of an engine
        loop.step()
        for run in dice.sample(loop.running, len(loop.running) // 3):
            loop.preempt(run)
            loop.resume(run)
    return batches


def batch_of(loop: Loop, runs: list[Run]) -> InputBatch:
    starts = loop.states.start_N.tolist()
    canvases = [run for run in runs if run.prefilled]
    context = loop.model_config.max_model_len
    lengths = [min(loop.canvas_length, context - starts[run.slot]) for run in canvases]
    return loop.batch(canvases, lengths, [run for run in runs if not run.prefilled])


def check_sequences(loop: Loop, batch: InputBatch, found: int) -> None:
    assert found <= max_sequences(loop.config, batch.num_reqs, batch.num_tokens)
    assert found <= batch.num_tokens


@pytest.mark.parametrize(
    "dllm", FAMILIES, ids=lambda dllm: f"{dllm['strategy']}-{len(dllm)}"
)
def test_no_step_has_more_sequences(dllm: dict[str, Any]) -> None:
    more_than_requests = 0
    for seed in range(6):
        for loop, batch in random_batches(dllm, seed):
            eager = batch_sequences(batch, loop.states)
            more_than_requests += len(eager.length_B) > len(loop.states.open_N)
            if not batch.has_prefill:
                captured = batch.num_reqs * sequences_per_canvas(loop.config)
                assert captured <= max_sequences(loop.config, batch.num_reqs, 0)
    # What vLLM's buffer, sized by requests, would not hold.
    assert (more_than_requests > 0) != (dllm["strategy"] == "dual_cache")


def test_the_bound_is_reached() -> None:
    """A prompt of blocks of one token is as many sequences as tokens."""
    loop = Loop({"strategy": "d2f", "block_length": 4, "canvas_length": 16})
    run = loop.start([1] * 40, Hashed(0), sampling(8, None, dllm_block_length=1))
    loop.states.requests.origin.np[run.slot] = 0
    sequences = batch_sequences(batch_of(loop, [run]), loop.states)
    assert len(sequences.length_B) == 40 == max_sequences(loop.config, 1, 40)
    with pytest.raises(
        AssertionError, match="40 attention sequences in a step of 40 tokens and 1"
    ):
        nothing = torch.empty(0)
        cache = KVCacheConfig(0, [], [])
        AttentionSequences(loop.states, 1, 39).build(
            batch_of(loop, [run]),
            KVGroups(40, nothing, (), nothing, [], cache),
            CUDAGraphMode.NONE,
            False,
        )


def test_the_buffer_holds_the_longest_schedule(engine_config: VllmConfig) -> None:
    scheduler = engine_config.scheduler_config
    for requests, tokens in ((64, 100), (2, 8192)):
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = requests, tokens
        most = max_sequences(get_decode_config(engine_config), requests, tokens)
        assert most == max(
            3 * requests, tokens
        )  # one block, the one behind it, and the rest
        assert len(builder_of(engine_config).scheduler_metadata) == schedule_size(most)
    # Another model may find our class under vLLM's name, and has one sequence per request.
    engine_config.additional_config = {}
    assert len(builder_of(engine_config).scheduler_metadata) == schedule_size(8192)
    builder = builder_of(engine_config)
    assert len(builder.second_schedule) == schedule_size(8192)
    assert len(builder.causal_lens) == len(builder.bidirectional_lens) == 8192


def test_what_lies_after_a_schedule_is_cleared(engine_config: VllmConfig) -> None:
    builder = builder_of(engine_config)
    buffer = builder.scheduler_metadata
    for entries in (1000, 8, len(buffer), 0):
        stored = builder._store_scheduler_metadata(torch.arange(1, entries + 1).int())
        assert stored is not None and stored.data_ptr() in (buffer.data_ptr(), 0)
        assert (
            buffer[:entries].tolist() == list(range(1, entries + 1)) == stored.tolist()
        )
        assert not buffer[entries:].any()
    with pytest.raises(
        AssertionError, match=f"takes {len(buffer) + 1} entries, but the buffer"
    ):
        builder._store_scheduler_metadata(torch.ones(len(buffer) + 1).int())
    assert builder._store_scheduler_metadata(None) is None


def four_requests() -> tuple[Loop, list[Run]]:
    """Requests with prompts and block lengths of their own, after a step of D2F."""
    loop = Loop(
        {
            "strategy": "d2f",
            "block_length": 4,
            "canvas_length": 12,
            "max_active_blocks": 2,
        }
    )
    runs = [
        loop.start(
            [1] * prompt, Hashed(prompt), sampling(40, None, dllm_block_length=block)
        )
        for prompt, block in ((3, 4), (9, 3), (17, 1), (2, 12))
    ]
    loop.step()
    return loop, runs


@pytest.mark.parametrize("length", [12, 4])
def test_a_graph_sees_the_same_sizes_and_buffers(
    length: int, engine_config: VllmConfig
) -> None:
    """Other requests, blocks and contexts change the contents of tensors and nothing else.

    Nor do steps of the other length in between, canvases or single blocks.
    """
    builder = builder_of(engine_config)
    # What its parent sets where FlashAttention 3 runs.
    builder.splits_limit = (
        engine_config.attention_config.flash_attn_max_num_splits_for_cuda_graph
    )
    group = AttentionGroup(
        SegmentFlashBackend, ["x"], SPEC, 0, metadata_builders=[builder]
    )
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["x"], SPEC)])
    loop, runs = four_requests()
    sequences, seen = AttentionSequences(loop.states, 4, 64), []
    for count in (4, 2, 3):
        sequences.captured(loop.batch(runs, [16 - length] * 4, []), ())
        batch = loop.batch(runs[:count], [length] * count, [])
        batch.num_reqs_after_padding, batch.num_tokens_after_padding = 4, 4 * length
        batch.seq_lens = torch.nn.functional.pad(batch.seq_lens, (0, 4 - count))
        tables, slots = (
            (torch.ones(4, 4, dtype=torch.int32),),
            torch.zeros(1, 4 * length).long(),
        )
        for_capture, mode = count == 4, CUDAGraphMode.FULL
        groups = KVGroups(64, batch.positions, tables, slots, [[group]], cache)
        metadata = sequences.build(batch, groups, mode, for_capture)["x"]
        tensors = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
        sizes = [(tensor.shape, tensor.data_ptr()) for tensor in tensors]
        lengths = (
            metadata.max_query_len,
            metadata.max_seq_len,
            metadata.max_num_splits,
        )
        seen.append((sizes, *lengths, metadata.num_actual_tokens, metadata.causal))
        assert metadata.query_start_loc[-1] == length * count
        assert not metadata.seq_lens[3 * count :].any()
    # vLLM's profile of graph memory runs before the context is fitted to the cache.
    tables = (torch.ones(4, 3, dtype=torch.int32),)
    groups = groups._replace(block_tables=tables)
    fitted = sequences.build(batch, groups, mode, True)["x"].block_table
    assert (
        fitted.shape == (12, 3)
        and sequences.block_tables[0].data_ptr() == fitted.data_ptr()
    )
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0][1][0] == (12,) and seen[0][1:] == (
        length,
        64,
        32,
        4 * length,
        False,
    )


@pytest.mark.parametrize("count", [4, 2, 3])
def test_prefix_and_suffix_are_what_sequences_see(
    count: int, engine_config: VllmConfig
) -> None:
    """Sequence by sequence the same queries and as many keys, the first of them the context."""
    builder = builder_of(engine_config)
    group = AttentionGroup(
        SegmentFlashBackend, ["x"], SPEC, 0, metadata_builders=[builder]
    )
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["x"], SPEC)])
    loop, runs = four_requests()
    batch = batch_of(loop, runs[:count])
    batch.num_reqs_after_padding, batch.num_tokens_after_padding = 4, 48
    bounds = [min(i, count) * 12 for i in range(5)]
    batch.query_start_loc = torch.tensor(bounds, dtype=torch.int32)
    batch.query_start_loc_np = batch.query_start_loc.numpy()
    batch.seq_lens = torch.nn.functional.pad(batch.seq_lens, (0, 4 - count)).int()
    tables, slots = (
        (torch.arange(16, dtype=torch.int32).view(4, 4),),
        torch.zeros(1, 48).long(),
    )
    groups = KVGroups(64, batch.positions, tables, slots, [[group]], cache)
    step = (batch, groups, CUDAGraphMode.FULL, False)
    plain = AttentionSequences(loop.states, 4, 64).build(*step)["x"]
    both = AttentionSequences(loop.states, 4, 64, cascade_from={12: 4})
    batch.num_reqs_after_padding = 3
    few = both.build(*step)["x"] if count < 4 else None
    # Steps of one block each have no cascade, whatever their number.
    single = loop.batch(runs, [4] * 4, [])
    assert both.build(single, *step[1:])["x"].canvas_suffix is None
    batch.num_reqs_after_padding = 4
    cascade = both.build(*step)["x"]
    batch.num_reqs_after_padding = 3
    again = both.build(*step)["x"] if count < 4 else None
    # Graphs of few requests find their sequences where they were.
    same = few is None or few.block_table.data_ptr() == again.block_table.data_ptr()
    assert same and (few is None or few.canvas_suffix is None)
    assert isinstance(cascade, SegmentFlashMetadata) and plain.canvas_suffix is None
    assert {m.positions.data_ptr() for m in (plain, cascade)} == {
        batch.positions.data_ptr()
    }
    suffix = cascade.canvas_suffix
    assert suffix is not None and suffix.length == cascade.max_query_len == 12
    assert suffix.start_loc.tolist() == plain.query_start_loc.tolist()
    request = suffix.request.squeeze(1)
    assert torch.equal(cascade.block_table[request], plain.block_table)
    assert cascade.query_start_loc.tolist() == bounds
    used = plain.query_start_loc.diff() > 0
    seen = cascade.seq_lens[request] + suffix.keys
    assert seen[used].tolist() == plain.seq_lens[used].tolist()
    assert not cascade.seq_lens[count:].any() and not suffix.keys[3 * count :].any()


def test_buffers_that_sleep_took_are_laid_out_again() -> None:
    buffers = CascadeBuffers(3, 2, torch.device("cpu"))
    stops = np.array([[4, 8], [8, 8]])
    for left_behind in (0, 77):
        for buffer in (buffers.request, buffers.keys, buffers.context):
            buffer.fill_(left_behind)
        buffers.lay_out(stops)
        assert buffers.request.tolist() == [[0], [0], [1], [1], [2], [2]]
        assert buffers.keys.tolist() == [4, 8, 8, 8, 0, 0] and buffers.context[2] == 0


def test_splits_take_no_more_memory_in_larger_graphs(engine_config: VllmConfig) -> None:
    engine_config.compilation_config.max_cudagraph_capture_size = 32768
    builder = builder_of(engine_config)
    assert builder.splits_limit == 0  # on the CPU, where nothing is scheduled
    builder.splits_limit = 32
    for tokens, splits in (
        (8, 32),
        (512, 32),
        (1024, 16),
        (8192, 2),
        (32768, 1),
        (32769, 0),
    ):
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        common = spans_of(bounds, tokens)
        assert builder.build(0, common).max_num_splits == splits
        assert splits * tokens <= max(SPLIT_TOKENS, tokens)


def spans_of(bounds: torch.Tensor, tokens: int) -> Any:
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=bounds[1:],
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=65536,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        causal=False,
    )


def test_a_step_with_two_masks(engine_config: VllmConfig) -> None:
    """Each half sees the keys of its own sequences only, from buffers that graphs can read."""
    builder = builder_of(engine_config)
    bounds = torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    lens = torch.tensor([5, 9, 0], dtype=torch.int32)
    common = spans_of(bounds, 4).replace(seq_lens=lens, num_reqs=3)
    plain = builder.build(0, common)
    assert plain.bidirectional is None and plain.seq_lens is lens
    for causal, ours, others in (
        ([1, 0, 0], [5, 0, 0], [0, 9, 0]),
        ([0, 0, 1], [0, 0, 0], [5, 9, 0]),
    ):
        mask = torch.tensor(causal, dtype=torch.int32)
        built = builder.build(0, common.replace(causal=mask))
        second = built.bidirectional
        assert second is not None and (built.causal, second.causal) == (True, False)
        assert built.seq_lens.tolist() == ours
        assert second.seq_lens.tolist() == others
        assert built.seq_lens.data_ptr() == builder.causal_lens.data_ptr()
        assert second.seq_lens.data_ptr() == builder.bidirectional_lens.data_ptr()
