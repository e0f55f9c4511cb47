"""Query segments and attention sequences against the mask that they stand for."""

import random

import numpy as np
import pytest
import torch
from scripted import Loop, sampling
from scripted_rows import Hashed, visible
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from dllm_plugin.attention import sequences
from dllm_plugin.attention.distinct import SpanBuffers
from dllm_plugin.attention.sequences import (
    AttentionSequences,
    Sequences,
    batch_sequences,
)
from dllm_plugin.decoding.plan import canvas_segments, prefill_segments


def keys_of(stops: np.ndarray, span: range) -> list[int]:
    """Keys of every position of a span, given the stops of its segments."""
    return [int(min(stop for stop in stops if stop > position)) for position in span]


def test_canvas_segments() -> None:
    for computed in range(1, 20):
        for length in range(1, 10):
            for blocks in range(1, 6):
                stops = canvas_segments(
                    np.array([computed]), np.array([length]), blocks
                )[0]
                assert len(stops) == blocks + 1 and stops[-1] == computed
                inside = range(min(computed, blocks * length))
                assert keys_of(stops, inside) == [
                    visible(p, 0, length, computed) for p in inside
                ]


def test_prefill_segments() -> None:
    for prompt in range(1, 8):
        for length in range(1, 6):
            ends = np.array([prompt, prompt + 3 * length, prompt + length])
            lengths = np.full(3, length)
            stops = prefill_segments(np.full(3, prompt), ends, lengths)
            for row, end in zip(stops, ends.tolist(), strict=True):
                expected = [visible(p, prompt, length, end) for p in range(end)]
                assert keys_of(row, range(end)) == expected


@pytest.mark.parametrize("captured", [False, True])
def test_sequences_of_a_mixed_batch(captured: bool) -> None:
    """Canvases in every phase and, in an eager step, prefills new and resumed.

    The sequences, and what every token sees where a request stays one sequence.
    """
    options = {"block_length": 4, "canvas_length": 12, "max_active_blocks": 3}
    loop = Loop({"strategy": "d2f"} | options)
    runs = [
        loop.start(
            [1] * prompt, Hashed(prompt), sampling(40, None, dllm_block_length=length)
        )
        for prompt, length in ((1, 4), (5, 3), (4, 1), (7, 8))
    ]
    for _ in range(4):
        loop.step()
    canvases = [run for run in runs if not run.done]
    prefills = [] if captured else [canvases.pop(1)]
    lengths = [min(12, 64 - len(run.prompt + run.output)) for run in canvases]
    batch = loop.batch(canvases, lengths, prefills)
    sequences = (
        captured_sequences(loop, batch)
        if captured
        else batch_sequences(batch, loop.states)
    )
    assert sequences.length_B.sum() == batch.num_tokens
    assert captured or (sequences.length_B > 0).all()
    assert not captured or len(sequences.length_B) == len(canvases) * 4
    seq_lens = batch.seq_lens.tolist()
    spans = spans_of(sequences, batch)
    for index, run in enumerate(canvases + prefills):
        mine = sequences.request_B == index
        keys = np.repeat(
            seq_lens[index] - sequences.unseen_B[mine], sequences.length_B[mine]
        )
        start, prompt = seq_lens[index] - len(keys), len(run.prompt)
        length = int(loop.states.requests.block_length.np[run.slot])
        most = seq_lens[index] if index >= len(canvases) else start + 3 * length
        span = range(start, min(seq_lens[index], most))
        expected = [visible(p, prompt, length, seq_lens[index]) for p in span]
        assert keys[: len(span)].tolist() == expected
        assert spans["span_start"][index] == start
        first = int(batch.query_start_loc[index])
        assert spans["keys_seen"][first : first + len(keys)].tolist() == keys.tolist()
    assert spans["keys_seen"][batch.num_tokens :].tolist() == [0] * PADDING


def test_sequences_that_are_laid_out_once_fit_every_step() -> None:
    """Requests come, go and change places between captured steps, or stay and see more keys.

    Steps compute whole canvases or one block of the configured length each, which is a share of
    some requests' own blocks, and several of others.
    """
    dice = random.Random(3)
    options = {"block_length": 4, "canvas_length": 12, "max_active_blocks": 3}
    loop = Loop({"strategy": "d2f"} | options, max_model_len=256)
    attention = AttentionSequences(loop.states, 8, 96)
    for prompt in range(1, 9):
        wish = sampling(200, None, dllm_block_length=dice.choice([1, 3, 4, 4, 12]))
        loop.start([1] * prompt, Hashed(prompt), wish, f"request-{prompt}")
    loop.step()
    runs, length, layouts = loop.running[:4], 12, set()
    for _ in range(60):
        if dice.random() < 0.5:
            runs = dice.sample(loop.running, dice.randint(1, len(loop.running)))
        if dice.random() < 0.2:
            length = 16 - length
        batch = loop.batch(runs, [length] * len(runs), [])
        batch.num_reqs_after_padding = dice.randint(len(runs), 8)
        captured, listed = (
            attention.captured(batch, ()),
            batch_sequences(batch, loop.states),
        )
        layouts.add(attention.layout)
        assert torch.equal(captured.query_start_loc, captured.query_start_loc_cpu)
        assert captured.max_query_len == length
        assert len(captured.seq_lens) == 4 * batch.num_reqs_after_padding
        lengths = captured.query_start_loc.diff().numpy()
        used = lengths > 0
        assert lengths[used].tolist() == listed.length_B.tolist()
        assert (used.nonzero()[0] // 4).tolist() == listed.request_B.tolist()
        keys = batch.seq_lens.numpy()[listed.request_B] - listed.unseen_B
        assert captured.seq_lens.numpy()[used].tolist() == keys.tolist()
        assert not captured.seq_lens[4 * len(runs) :].any()
        loop.step()
    assert 10 < len(layouts) < 60
    assert {layout[0] for layout in layouts} == {4, 12}
    for length in (5, 8):
        error = f"{length} tokens of 1 requests are neither canvas"
        with pytest.raises(AssertionError, match=error):
            attention.captured(loop.batch(runs[:1], [length], []), ())


def test_blocks_in_full_graphs_see_the_whole_canvas() -> None:
    """Full attention, with canvases that began at different times and windows of their own."""
    dice, options = random.Random(4), {"block_length": 4, "canvas_length": 12}
    loop = Loop({"strategy": "dual_cache"} | options, max_model_len=256)
    attention = AttentionSequences(loop.states, 8, 96)
    for prompt in range(1, 9):
        window = {"dllm_suffix_window": dice.randint(0, 9)} if prompt % 2 else {}
        loop.start(
            [1] * prompt,
            Hashed(prompt),
            sampling(40, None, **window),
            f"request-{prompt}",
        )
    seen = set()
    for _ in range(30):
        runs = dice.sample(loop.running, dice.randint(1, 8))
        batch = loop.batch(runs, [4] * len(runs), [])
        padded = batch.num_reqs_after_padding = dice.randint(len(runs), 8)
        slots = batch.idx_mapping_np[: len(runs)]
        start = loop.states.requests.prompt_len_np[slots] + 4 * dice.randint(0, 2)
        batch.num_computed_tokens_np = start
        batch.seq_lens = torch.from_numpy(start + 4)
        captured, listed = (
            attention.captured(batch, ()),
            batch_sequences(batch, loop.states),
        )
        lengths = captured.query_start_loc.diff().tolist()
        assert lengths == [4] * len(runs) + [0] * (padded - len(runs))
        stop = loop.states.bounds_np(slots, start).stop.tolist()
        assert captured.seq_lens.tolist() == stop + [0] * (padded - len(runs))
        assert (start + 4 - listed.unseen_B).tolist() == stop
        seen.update((stop - start).tolist())
    assert len(seen) > 3


def test_refreshes_in_full_graphs_see_all_keys_before_them() -> None:
    """Those that begin near their block: as many positions before it as the engine was told."""
    near = {"full_refresh_every": 4, "refresh_before": 3, "suffix_window": 4}
    loop = Loop(
        {"strategy": "dual_cache", "block_length": 4, "canvas_length": 16} | near
    )
    attention = AttentionSequences(loop.states, 8, 96)
    for prompt in (5, 9):
        loop.start(
            [1] * prompt, Hashed(prompt), sampling(16, None), f"request-{prompt}"
        )
    for block, length in ((1, 11), (2, 11), (3, 7)):
        batch = loop.batch(loop.running, [length, length], [])
        batch.num_draft_tokens_per_req = np.array([length - 3] * 2)
        start = np.array([5, 9]) + 4 * block - 3
        batch.num_computed_tokens_np, batch.seq_lens = (
            start,
            torch.from_numpy(start + length),
        )
        captured, listed = (
            attention.captured(batch, ()),
            batch_sequences(batch, loop.states),
        )
        assert captured.query_start_loc.tolist() == [0, length, 2 * length]
        assert captured.seq_lens.tolist() == (start + length).tolist()
        assert listed.length_B.tolist() == [length] * 2 and not listed.unseen_B.any()
        assert captured.max_query_len == length
    with pytest.raises(AssertionError, match="neither"):
        attention.captured(loop.batch(loop.running, [13, 13], []), ())


def test_where_a_block_is_seen_to_is_worked_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the same blocks go on, nothing of it is copied to the device again."""
    loop = Loop({"strategy": "dual_cache", "block_length": 4, "canvas_length": 12})
    attention = AttentionSequences(loop.states, 8, 96)
    for prompt in (1, 2):
        loop.start(
            [1] * prompt, Hashed(prompt), sampling(12, None), f"request-{prompt}"
        )
    copies, copy = [], sequences.async_tensor_h2d
    monkeypatch.setattr(
        sequences, "async_tensor_h2d", lambda *a, **k: copies.append(a) or copy(*a, **k)
    )
    counts = []
    for blocks in ([0, 0], [0, 0], [0, 1], [0, 1], [1, 1], [1, 1], [2, 2], [0, 0]):
        batch = loop.batch(loop.running, [4, 4], [])
        start = np.array([1, 2]) + 4 * np.array(blocks)
        batch.num_computed_tokens_np, batch.seq_lens = (
            start,
            torch.from_numpy(start + 4),
        )
        copies.clear()
        captured = attention.captured(batch, ())
        counts.append(len(copies))
        assert captured.seq_lens.tolist() == [13, 14]
    assert counts[1:] == [0, 1, 0, 1, 0, 1, 1]


PADDING = 3


def captured_sequences(loop: Loop, batch: InputBatch) -> Sequences:
    """What the device computes for a graph padded by a request, as the host lists sequences."""
    attention = AttentionSequences(loop.states, batch.num_reqs + 2, batch.num_tokens)
    for left_behind in (attention.query_start_loc[1:], attention.seq_lens):
        left_behind.fill_(77)
    batch.num_reqs_after_padding = batch.num_reqs + 1
    each, pages = attention.sequences_per_request, 5
    table = torch.arange((batch.num_reqs + 1) * pages, dtype=torch.int32).view(
        -1, pages
    )
    captured = attention.captured(batch, (table,))
    assert torch.equal(captured.block_tables[0], table.repeat_interleave(each, 0))
    assert torch.equal(captured.query_start_loc, captured.query_start_loc_cpu)
    used = batch.num_reqs * each
    assert captured.query_start_loc.tolist()[used:] == [batch.num_tokens] * (each + 1)
    assert captured.seq_lens.tolist()[used:] == [0] * each
    request = np.arange(batch.num_reqs).repeat(each)
    lengths = captured.query_start_loc[: used + 1].diff().numpy()
    unseen = batch.seq_lens.numpy()[request] - captured.seq_lens[:used].numpy()
    assert captured.max_query_len >= lengths.max()
    return Sequences(request, lengths, unseen)


def spans_of(sequences: Sequences, batch: InputBatch) -> dict[str, Tensor]:
    """As a captured graph needs them: empty segments and tokens of nobody included."""
    request = torch.from_numpy(sequences.request_B)
    keys = batch.seq_lens[request] - torch.from_numpy(sequences.unseen_B)
    starts = torch.from_numpy(np.concatenate([[0], sequences.length_B.cumsum()])).to(
        torch.int32
    )
    buffers = SpanBuffers(
        batch.num_reqs, batch.num_tokens + PADDING, torch.device("cpu")
    )
    segments = (starts, keys.to(torch.int32))
    query_start_loc = batch.query_start_loc[: batch.num_reqs + 1].to(torch.int32)
    stop = batch.seq_lens[: batch.num_reqs].to(torch.int32)
    return buffers.fill(*segments, query_start_loc, stop, batch.num_tokens + PADDING)


@pytest.mark.parametrize(
    "strategy", ["d2f", "block_diffusion", "dual_cache", "semi_autoregressive"]
)
def test_a_dummy_batch_stays_in_its_block_table(strategy: str) -> None:
    """An idle data-parallel rank computes what the busy one does, as one request: 4,096 tokens."""
    dllm = {"strategy": strategy, "block_length": 8, "canvas_length": 8}
    loop = Loop(dllm, max_model_len=64)
    attention = AttentionSequences(loop.states, 1, 4096)
    dummy = InputBatch.make_dummy(1, 4096, InputBuffers(1, 4096, loop.states.device))
    listed = attention.eager(
        dummy, (torch.zeros(1, 4, dtype=torch.int32),)
    )  # pages of 16 tokens
    assert int(listed.seq_lens.max()) == 64
    assert int(listed.query_start_loc[-1]) == 4096
