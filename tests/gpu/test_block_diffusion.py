"""Block diffusion on LLaDA and Dream, as `diffuplug bench` runs it, on a GPU: fp32, Triton, async.

Full CUDA graphs of whole canvases, and of single blocks where many requests run, against the loop
in plain torch on the CPU. Random orders are the same there: they come from 64-bit integers.
"""

import os
from collections import Counter

import pytest
import recorded
from dummies import worker_of

# By its folder: the plain name is that of this file. What it imports `recorded` has made known.
from engine.test_block_diffusion import BLOCKS, WISHES, num_commits, plain, request
from engines import CHECKPOINTS, FAMILIES, a_prompt, forwards, token_ids

from dllm_plugin.reference.model import PlainModel


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """To look at steps. An engine makes vLLM remember this choice, which later tests need not."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    yield
    from vllm import envs

    envs.disable_envs_cache()


def start(family, dllm, monkeypatch):
    """An engine, and how many steps had which length per request in full graphs, None in others."""
    engine = recorded.start(
        f"checkpoints/tiny-{family}", BLOCKS | dllm, async_scheduling=True
    )
    manager, lengths = worker_of(engine).model_runner.cudagraph_manager, Counter()
    dispatch = manager.dispatch

    def note(*batch, **options):
        desc = dispatch(*batch, **options)
        lengths[desc.uniform_token_count] += 1
        return desc

    monkeypatch.setattr(manager, "dispatch", note)
    return engine, lengths


COMMITS: dict[str, int] = {}  # forwards that only store a block, by name of a run


def decode(engine, family, jobs):
    """Name, plain text and output of each job, alone and then in one batch; ends the engine."""
    found = recorded.decode(
        engine, jobs, lambda job: job[0], lambda job: request(*job[1:])
    )
    model = PlainModel.load(CHECKPOINTS / f"tiny-{family}")
    texts, runs = [plain(model, *job) for job in jobs], []
    for i, (job, output) in enumerate(found):
        where, number = "alone" if i < len(jobs) else "together", jobs.index(job)
        name = f"{where}, prompt {number}, block length, tokens and wish {job[1:]}"
        COMMITS[name] = num_commits(model, *job)
        runs.append((name, texts[number], output))
    return runs


def differences(runs):
    """Where each text that is not the loop's begins to differ, and how near a tie the loop came."""
    wrong = []
    for name, text, output in runs:
        got, want = token_ids(output), text.answer()
        if got != want:
            at = len(os.path.commonprefix([got, want]))
            found = f"{got[at : at + 3]} for {want[at : at + 3]} from {at} on"
            wrong.append(f"{name}: {found}, nearest tie of tokens {text.margin:.1e}")
    return wrong


def extra_forwards(runs):
    """By name: forwards beyond the loop's denoising ones, and its forwards that only store."""
    return {
        name: (forwards(out) - len(text.forwards), COMMITS[name])
        for name, text, out in runs
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_canvases(family, monkeypatch):
    """Requests with block lengths of their own compute whole canvases like the others."""
    engine, lengths = start(family, {"commit_alone_from": 0}, monkeypatch)
    shapes = [(16, 48), (8, 20), (32, 40)]
    jobs = [
        (a_prompt(5 + 9 * i, i), *shapes[i % 3], wish) for i, wish in enumerate(WISHES)
    ]
    runs = decode(engine, family, jobs)
    assert differences(runs) == []
    assert {
        name: extra for name, extra in extra_forwards(runs).items() if extra[0]
    } == {}
    # Only prompts are computed in other graphs.
    assert lengths.keys() == {None, 64} and lengths[None] <= 2 * len(jobs), lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_single_blocks_if_many_requests_run(family, monkeypatch):
    """Answers of several lengths: once three requests are left, commits share forwards again."""
    dllm = {"block_length": 16, "commit_alone_from": 4}
    engine, lengths = start(family, dllm, monkeypatch)
    jobs = [
        (a_prompt(5 + 9 * i, i), 16, 16 + 8 * i, wish) for i, wish in enumerate(WISHES)
    ]
    runs = decode(engine, family, jobs)
    assert differences(runs) == []
    alone, together = (
        extra_forwards(runs[: len(jobs)]),
        extra_forwards(runs[len(jobs) :]),
    )
    assert {name: extra for name, extra in alone.items() if extra[0]} == {}
    assert all(0 <= extra <= most for extra, most in together.values()), together
    assert sum(extra for extra, _ in together.values()) > 0, together
    assert lengths.keys() == {None, 16, 32} and lengths[None] <= 2 * len(jobs), lengths
