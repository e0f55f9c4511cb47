"""Frames and early text: what is decided reaches the host, and no token is another for it."""

from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    LETTERS,
    EngineRoom,
    a_prompt,
    canvas_states,
    letters,
    num_preemptions,
    params,
    scheduler,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from dllm_plugin.api.frames import Frames
from dllm_plugin.config.carriers import Snapshot, unpack_snapshot

pytestmark = pytest.mark.slow

LENGTH = 40
PROMPTS = [a_prompt(9, 1), a_prompt(30, 2), a_prompt(45, 3)]
# Of letters, which are no family's mask.
WITHOUT_MASKS = [letters(9, 1), letters(30, 2), letters(45, 3)]
ENGINES: dict[str, dict[str, Any]] = {
    "d2f-async": {"async_scheduling": True},
    # A width that load cannot change.
    "floating-async": {
        "dllm": {
            "strategy": "d2f",
            "adaptive": "throughput",
            "min_window": 8,
            "max_window": 8,
        },
        "async_scheduling": True,
    },
    "llada-dual": {"dllm": {"strategy": "dual_cache"}},
    "dream-dual": {"family": "dream", "dllm": {"strategy": "dual_cache"}},
    "dream-own": {"family": "dream", "dllm": {"strategy": "semi_autoregressive"}},
    "sdar-async": {"family": "sdar", "dllm": {}, "async_scheduling": True},
    "fast-dllm": {"family": "fast-dllm-v2", "dllm": {}},
}
every_engine = pytest.mark.parametrize("name", ENGINES, scope="module")
Pieces = list[tuple[int, Any]]  # (engine step, output)


def stream(
    llm: Any,
    *wishes: dict[str, Any],
    preempt: int = 0,
    prompts: Sequence[list[int]] = PROMPTS,
) -> tuple[list[Pieces], list[Any]]:
    """Outputs as they come, and the tokens that the engine ends with."""
    engine, step = llm.llm_engine, 0
    for i, wish in enumerate(wishes):
        wish = params(LENGTH, output_kind=RequestOutputKind.DELTA, **wish)
        engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, wish)
    requests = {r.split("-")[0]: q for r, q in scheduler(llm).requests.items()}
    pieces: list[Pieces] = [[] for _ in wishes]
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces[int(output.request_id)].append((step, output))
        step += 1
        assert step < 1000
        if preempt and step % preempt == 0:
            llm.reset_prefix_cache(reset_running_requests=True)
    return pieces, [list(requests[str(i)].output_token_ids) for i in range(len(wishes))]


def tokens(pieces: Pieces) -> list[int]:
    return [token for _, output in pieces for token in output.outputs[0].token_ids]


def arrivals(pieces: Pieces) -> list[int]:
    """The engine step in which each token came."""
    return [step for step, output in pieces for _ in output.outputs[0].token_ids]


def snapshots(pieces: Pieces) -> list[Snapshot]:
    found = [unpack_snapshot(copy(output)) for _, output in pieces]
    return [snapshot for snapshot in found if snapshot is not None]


def replay(pieces: Pieces) -> list[dict[str, Any]]:
    """Frames of a request, which come out as its text: a token's name is its number."""
    frames, text, shown, out = Frames(lambda ids: f"<{ids[0]}>"), [], {}, []
    for _, output in pieces:
        frames.tokens.extend(output.outputs[0].token_ids)
        for snapshot in snapshots([(0, output)]):
            out.append(frame := frames.frame(snapshot))
            for position in frame["unset"]:
                del shown[position]
            shown |= {position: text for position, text, _ in frame["set"]}
    text = [f"<{token}>" for token in tokens(pieces)]
    assert [shown[i] for i in range(LENGTH)] == text
    return out


@every_engine
def test_frames_and_early_text(name: str, room: EngineRoom) -> None:
    check_frames_and_early_text(room.start(**ENGINES[name]))


def check_frames_and_early_text(llm: Any, paced: bool = True) -> None:
    """Also for tests of families, on engines that they have.

    paced  whether a step of the engine is a forward: while a canvas is watched, steps under full
           attention are not scheduled ahead, and every second call only waits
    """
    given = {"prompts": WITHOUT_MASKS}
    plain, ends = stream(llm, {}, {}, {"logprobs": 1}, **given)
    both = {"dllm_frames": 1, "dllm_early_text": 1}
    wishes = ({"dllm_frames": 3}, both, both | {"logprobs": 1})
    asked, _ = stream(llm, *wishes, **given)
    for before, after, end in zip(plain, asked, ends, strict=True):
        assert tokens(before) == tokens(after) == end
        ended = [pieces[-1][1].outputs[0] for pieces in (before, after)]
        assert ended[0].finish_reason == ended[1].finish_reason == "length"
    # Without early text no piece moves, and a snapshot comes every third forward.
    texts = [(step, o) for step, o in asked[0] if o.outputs[0].token_ids]
    assert [tokens([piece]) for piece in texts] == [
        tokens([piece]) for piece in plain[0]
    ]
    forwards = [snapshot.forward for snapshot in snapshots(asked[0])]
    assert min(np.diff(forwards[:-1]), default=3) >= 3
    for pieces in asked:
        frames = replay(pieces)
        finals = [frame["final"] for frame in frames]
        assert finals == sorted(finals) and finals[-1] == LENGTH
        certain = [entry[2] for frame in frames for entry in frame["set"]]
        assert sum(value is not None for value in certain) > LENGTH // 2
        assert all(value is None or 0 < value <= 1 for value in certain)
    # Every token comes no later, measured in forwards of a step that all three share.
    early, late = arrivals(asked[1]), arrivals(plain[1])
    if paced:
        assert [a - b for a, b in zip(early, late, strict=True) if a > b + 2] == []
        assert sum(early) < sum(late)
    scored = [
        [
            entry[token].logprob
            for entry, token in zip(o.logprobs, o.token_ids, strict=True)
        ]
        for pieces in (plain[2], asked[2])
        for o in (output.outputs[0] for _, output in pieces)
        if o.token_ids
    ]
    flat = np.array([value for piece in scored for value in piece]).reshape(2, LENGTH)
    np.testing.assert_allclose(flat[0], flat[1], atol=1e-4)


def check_frames(llm: Any) -> None:
    """Of models whose blocks may still change: they alter no text, and end with it."""
    given = {"prompts": WITHOUT_MASKS}
    before, ends = stream(llm, {}, {}, **given)
    asked, _ = stream(llm, {"dllm_frames": 3}, {"dllm_frames": 1}, **given)
    for plain, pieces, end in zip(before, asked, ends, strict=True):
        assert tokens(plain) == tokens(pieces) == end
        finals = [frame["final"] for frame in replay(pieces)]
        assert finals == sorted(finals) and finals[-1] == LENGTH


ONE_BLOCK = {"dllm_policy": "low_confidence", "dllm_block_length": LENGTH}


@pytest.mark.parametrize("name", ["dream-own", "dream-dual"])
def test_time_to_first_text_of_one_block(name: str, room: EngineRoom) -> None:
    """A block that is the whole answer comes with its last forward, or as it forms."""
    llm = room.start(**ENGINES[name])
    late, _ = stream(llm, ONE_BLOCK)
    early, _ = stream(llm, ONE_BLOCK | {"dllm_early_text": 1})
    assert tokens(early[0]) == tokens(late[0])
    assert (
        set(arrivals(late[0])) == {arrivals(late[0])[-1]}
        and arrivals(late[0])[0] == LENGTH - 1
    )
    assert (
        arrivals(early[0])[0] < arrivals(late[0])[0]
        and len(set(arrivals(early[0]))) > 3
    )


@pytest.mark.parametrize("name", ["dream-own", "sdar-async"])
def test_a_stop_inside_of_a_run(name: str, room: EngineRoom) -> None:
    """A stop string or a stop token ends the text where it does without early text, no later."""
    llm = room.start(**ENGINES[name])
    wish = {"allowed_token_ids": LETTERS, "temperature": 1.0, "seed": 4}
    wish |= ONE_BLOCK if name == "dream-own" else {}
    whole = "".join(o.outputs[0].text for _, o in stream(llm, wish)[0][0])
    ends = {}
    for stop in (
        {"stop": [whole[20:23]]},
        {"stop_token_ids": [LETTERS[0] + ord(whole[30]) - 97]},
    ):
        for early in (0, 1):
            [pieces], _ = stream(llm, wish | stop | {"dllm_early_text": early})
            text, last = "".join(o.outputs[0].text for _, o in pieces), pieces[-1]
            ends[early] = (
                text,
                last[1].outputs[0].finish_reason,
                last[1].outputs[0].stop_reason,
            )
            ends[early + 2] = last[0]
        assert ends[0] == ends[1] and ends[0][1] == "stop" and ends[3] <= ends[2]
        assert ends[0][0] and whole.startswith(ends[0][0]) and len(ends[0][0]) < LENGTH


@pytest.mark.parametrize("name", ["dream-dual", "dream-own", "llada-dual"])
@pytest.mark.parametrize("every", [5, 7])
def test_what_was_sent_survives_preemption(
    name: str, every: int, room: EngineRoom
) -> None:
    """A block that starts again keeps the run that was handed out."""
    llm = room.start(**ENGINES[name])
    before = num_preemptions(llm)
    wish = {"dllm_frames": 1, "dllm_early_text": 1, "dllm_policy": "low_confidence"}
    wish |= {"dllm_block_length": 20, "dllm_steps": 4}
    pieces, ends = stream(llm, wish, wish, wish, preempt=every)
    assert num_preemptions(llm) > before
    for piece, end in zip(pieces, ends, strict=True):
        assert tokens(piece) == end
        finals = [snapshot.final for snapshot in snapshots(piece)]
        assert finals == sorted(finals)
        for told in snapshots(piece)[:-1]:  # what was sent is never a mask again
            assert min(told.ids[: told.final - told.start], default=0) >= 0
    assert sum(len(set(arrivals(piece))) for piece in pieces) > 6, (
        "more pieces than blocks"
    )


def test_nobody_asks_and_nobody_pays(room: EngineRoom) -> None:
    """No table, no rows behind log-probabilities, no message, no trace."""
    llm = room.start(dllm={"strategy": "prefix_cache"})
    before = len(canvas_states(llm).companions)
    results: list[Any] = []
    update = scheduler(llm).update_from_output

    def noting(planned: Any, result: Any) -> Any:
        results.append(result.logprobs)
        outputs = update(planned, result)
        for output in (o for each in outputs.values() for o in each.outputs):
            results.extend((output.kv_transfer_params, output.routed_experts))
        return outputs

    scheduler(llm).update_from_output = noting
    pieces, _ = stream(llm, {}, {}, {})
    del scheduler(llm).update_from_output
    assert len(results) > 5 and set(results) == {None}
    assert len(canvas_states(llm).companions) == before == 0
    assert all(o.outputs[0].token_ids for piece in pieces for _, o in piece)


class Remote(ExampleConnector):
    """vLLM's connector to files, which also says where a request's pages are."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return False, {"remote_blocks": len(block_ids)}


@pytest.fixture
def connected(room: EngineRoom, tmp_path: Path) -> Iterator[Any]:
    """An engine whose scheduler has a connector of vLLM's factory.

    The engine's options refuse connectors, since no worker loads their pages into a canvas.
    """
    llm = room.start(dllm={"strategy": "dual_cache"})
    scheduling = scheduler(llm)
    config = copy(scheduling.vllm_config)
    config.scheduler_config = copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = (
        True  # files have one kind
    )
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=Remote.__name__,
        kv_role="kv_both",
        kv_connector_module_path=__name__,
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    scheduling.connector = KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, scheduling.kv_cache_config
    )
    yield llm
    room.close()


def test_a_connectors_parameters_stay(connected: Any) -> None:
    """Of a watched request too: the last output has them and a snapshot."""
    both = {"dllm_frames": 1, "dllm_early_text": 1}
    pieces, _ = stream(connected, {}, {"dllm_frames": 1}, both)
    for watched, of_request in zip((False, True, True), pieces, strict=True):
        *others, (_, last) = of_request
        assert last.kv_transfer_params["remote_blocks"] > 0
        assert (unpack_snapshot(last) is not None) == watched
        assert set(last.kv_transfer_params) == {"remote_blocks"}
        for _, output in others:
            unpack_snapshot(output)
            assert output.kv_transfer_params is None


def test_refused_if_tokens_may_be_replaced(room: EngineRoom) -> None:
    llm = room.start("llada2.1", {"policy": "joint_threshold"})
    sentence = "dllm_early_text cannot be combined with policy joint_threshold, which may still"
    with pytest.raises(VLLMValidationError, match=sentence):
        stream(llm, {"dllm_early_text": 1})
    check_frames(llm)
