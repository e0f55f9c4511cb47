"""Counts in replies, fields of a body, and the plugins that a server loads."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from dllm_plugin.api.answers import read_fields
from dllm_plugin.api.watched_engine import (
    Counts,
    add_counts,
    counts_of,
    total,
    with_counts,
)
from dllm_plugin.commands import serve
from dllm_plugin.config.request.arguments import GRAMMAR_MODES

METHOD = {"strategy": "dual_cache", "policy": "threshold"}
ONE = Counts(forwards=4, tokens=10, computed_positions=90, wasted_positions=60)
IN_JSON = {
    "forwards": 4,
    "tokens": 10,
    "tokens_per_forward": 2.5,
    "computed_positions": 90,
    "wasted_positions": 60,
}


def test_counts_of_what_the_scheduler_sent() -> None:
    sent = RequestSpecDecodeMetrics(8, [2, 0, 0, 0, 0, 2, 0, 0, 0], num_draft_tokens=90)
    completion = CompletionOutput(0, "", [], None, None, spec_decode_metrics=sent)
    assert counts_of(completion, tokens=10, prompt_tokens=20) == ONE
    assert ONE.as_json() == IN_JSON and list(ONE.as_json()) == list(IN_JSON)
    sent.per_step_drafted = [16]
    assert counts_of(completion, tokens=10, prompt_tokens=36) == ONE, (
        "cached tokens cost nothing"
    )
    sent.per_step_drafted = [16, GRAMMAR_MODES.index("automaton")]
    held = counts_of(completion, tokens=10, prompt_tokens=36)
    assert held == ONE._replace(grammar="automaton")
    assert held.as_json() == IN_JSON | {"grammar": "automaton"}
    assert total([held, held]) == Counts(8, 20, 180, 120, "automaton")
    sent.per_step_drafted = [16, 0, 9, 6]
    judged = counts_of(completion, tokens=10, prompt_tokens=36)
    assert judged == ONE._replace(drafts=(9, 6))
    both = {"drafted_tokens": 9, "accepted_tokens": 6}
    assert judged.as_json() == IN_JSON | both
    assert total([judged, judged]) == Counts(8, 20, 180, 120, None, (18, 12))
    # Canvases that float: 40 positions in forwards, the others are the prompt's or in flight.
    sent.per_step_accepted, sent.per_step_drafted = [0, 5, 0, 5], [10, 10, 10, 10]
    assert counts_of(completion, 10, 70, cached=50) == ONE
    assert counts_of(completion, 10, 70) == ONE._replace(wasted_positions=30)
    completion.spec_decode_metrics = None
    assert counts_of(completion, 10, 20) is None
    assert total([ONE, ONE]) == Counts(8, 20, 180, 120)
    assert Counts(0, 0, 0, 0).as_json()["tokens_per_forward"] == 0


def test_a_reply_and_its_usage() -> None:
    engine: Any = SimpleNamespace(counts={0: ONE, 1: ONE}, traces={})
    choices = [{"index": i, "finish_reason": "stop"} for i in range(3)]
    reply = {
        "object": "text_completion",
        "choices": choices,
        "usage": {},
        "metrics": None,
    }
    add_counts(reply, engine, METHOD)
    assert [choice.get("diffusion") for choice in choices] == [IN_JSON, IN_JSON, None]
    assert reply["metrics"] == {"diffusion": total([ONE, ONE]).as_json() | METHOD}


def test_a_stream_is_rewritten_only_after_ends() -> None:
    engine: Any = SimpleNamespace(counts={}, traces={})
    untouched = 'data: {"choices" : [{"index":0, "finish_reason":null}]}\n\n'
    end = {
        "choices": [{"index": 0, "finish_reason": "stop", "delta": {"content": "é"}}]
    }
    usage = {"choices": [], "usage": {"total_tokens": 3}}

    async def events() -> AsyncGenerator[str, None]:
        yield untouched
        engine.counts[0] = ONE
        for body in (end, usage):
            yield f"data: {json.dumps(body)}\n\n"
        yield 'data: {"error": "late"}\n\n'
        yield "data: [DONE]\n\n"

    async def collect() -> list[str]:
        return [event async for event in with_counts(events(), engine, METHOD)]

    first, *rewritten, error, done = asyncio.run(collect())
    assert (first, error, done) == (
        untouched,
        'data: {"error": "late"}\n\n',
        "data: [DONE]\n\n",
    )
    assert "é" in rewritten[0] and "\\u" not in rewritten[0]
    got = [json.loads(event.removeprefix("data: ")) for event in rewritten]
    assert got[0]["choices"][0]["diffusion"] == IN_JSON
    assert got[1]["metrics"] == {"diffusion": IN_JSON | METHOD}


@pytest.mark.parametrize(
    "body,word", [({"frame": 1}, "'frame'"), (3, "got 3"), (None, "got None")]
)
def test_fields_are_refused_by_name(body: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_fields(body, streams=True)


LONG = "x" * 9999


@pytest.mark.parametrize(
    "body",
    [
        LONG,
        {LONG: 1},
        {"early_text": LONG},
        {"frames": LONG},
        {"frames": {"every": LONG}},
    ],
    ids=range(5),
)
def test_long_values_are_cut(body: Any) -> None:
    with pytest.raises(ValueError, match="x{50}") as caught:
        read_fields(body, streams=True)
    assert len(str(caught.value)) < 200


def test_plugins_that_serve_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    serve.name_plugins()
    names = serve.os.environ["VLLM_PLUGINS"].split(",")
    ours = {"diffuplug", "diffuplug_images", "register_dllm_models", "register_omni"}
    assert names[-1] == "diffuplug_api" and ours < set(names)
    assert names[:-1] == sorted(names[:-1]) and capsys.readouterr().err == ""
    for chosen in ("diffuplug_api", "register_dllm_models,diffuplug_api"):
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
        serve.name_plugins()
        assert (
            serve.os.environ["VLLM_PLUGINS"] == chosen and capsys.readouterr().err == ""
        )
    monkeypatch.setenv("VLLM_PLUGINS", "register_dllm_models")
    serve.name_plugins()
    assert serve.os.environ["VLLM_PLUGINS"] == "register_dllm_models"
    assert capsys.readouterr().err == (
        "The endpoints of DiffuPlug are off: VLLM_PLUGINS does not name diffuplug_api.\n"
    )
