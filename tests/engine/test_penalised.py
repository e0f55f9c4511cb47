"""Penalised requests on real engines: tokens and forwards of the plain loops."""

import re
from typing import Any

import pytest
from engines import (
    CANVAS,
    CONTEXT,
    LETTERS,
    EngineRoom,
    a_prompt,
    forwards,
    generate,
    num_preemptions,
    params,
    results,
    token_ids,
)
from full_jobs import TOO_CLOSE, run_interrupted
from jobs import CANVAS as D2F_CANVAS
from jobs import plain_model

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import FILL, Text

pytestmark = pytest.mark.slow

PENALTIES: tuple[dict[str, float], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "temperature": 0.8, "seed": 5},
    {"frequency_penalty": 0.7, "repetition_penalty": 0.8},
    {"presence_penalty": -1.0, "frequency_penalty": 0.4},
)
OF_VLLM = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("temperature", "seed"),
)
NUMBERS: dict[str, dict[str, Any]] = {
    "d2f": {"block_length": 16, "threshold": 0.5},
    "semi_autoregressive": {"policy": "low_confidence", "block_length": 16, "steps": 6},
    "dual_cache": {"policy": "threshold", "threshold": 0.4, "block_length": 16},
    "llada2.1": {"policy": "joint_threshold", "block_length": 16, "threshold": 0.6}
    | {"editing_threshold": 0.1, "max_post_steps": 4},
    "fast-dllm-v2": {"threshold": 0.5, "sub_block_length": 8},
}


def wish(max_tokens: int, numbers: dict[str, Any], **options: Any) -> Any:
    """Parameters of a request; what is not vLLM's is ours."""
    asked = {k if k in OF_VLLM else f"dllm_{k}": v for k, v in numbers.items()}
    return params(max_tokens, **asked, **options)


def check(llm: Any, texts: list[Text], wishes: list[Any], least: int) -> None:
    """Tokens and forwards, but for texts that rest on a close call."""
    outputs = generate(llm, [text.prompt for text in texts], wishes)
    compared = 0
    for text, output in zip(texts, outputs, strict=True):
        expected = decode(text)
        if text.margin > TOO_CLOSE:
            assert (token_ids(output), forwards(output)) == expected
            compared += 1
    assert compared >= least


def jobs(
    model: PlainModel, rules: dict[str, Any], numbers: dict[str, Any]
) -> tuple[list[Text], list[Any]]:
    """Requests with each kind of penalties, and without any."""
    texts, wishes = [], []
    for i, penalties in enumerate([*PENALTIES, {}, *PENALTIES]):
        asked, length = numbers | penalties, 40 + 3 * i
        prompt = a_prompt(9 + 7 * i, i)
        texts.append(Text(model, prompt, length, Rules(**rules | asked)))
        wishes.append(wish(length, asked))
    return texts, wishes


@pytest.mark.parametrize("overlapped", [True, False], ids=["async", "sync"])
def test_d2f(overlapped: bool, room: EngineRoom) -> None:
    """Several open blocks, requests that are preempted, and requests alone."""
    llm = room.start("llada", async_scheduling=overlapped)
    numbers = NUMBERS["d2f"]
    rules = {"strategy": "d2f", "canvas_length": D2F_CANVAS, "max_active_blocks": 8}
    texts, wishes = jobs(plain_model("llada"), rules, numbers)
    check(llm, texts, wishes, 7)
    before = num_preemptions(llm)
    pairs = [(text.prompt, asked) for text, asked in zip(texts, wishes, strict=True)]
    outputs = run_interrupted(llm, pairs, every=3)
    assert overlapped or num_preemptions(llm) > before
    for text, output in zip(texts, outputs, strict=True):
        assert token_ids(output) == text.answer() or text.margin < TOO_CLOSE
    # Alone, each has the text that it has among others.
    together = results(generate(llm, [text.prompt for text in texts], wishes))
    for text, asked, expected in zip(texts, wishes, together, strict=True):
        assert results(generate(llm, [text.prompt], asked)) == [expected]


@pytest.mark.parametrize("decoding", ["drafts", "automaton"])
def test_structured_output(room: EngineRoom, decoding: str) -> None:
    """Of the letters that the grammar allows each comes once; the text stays valid."""
    from vllm.sampling_params import StructuredOutputsParams

    llm, texts = room.start("llada"), []
    prompt = LETTERS[8:20]
    for penalty in (1.0, 2.0):
        # One position a forward, so that each sees what was decided before.
        asked = params(
            24,
            ignore_eos=False,
            structured_outputs=StructuredOutputsParams(regex="[a-h]{6}"),
            dllm_grammar=decoding,
            dllm_threshold=1.0,
            dllm_block_length=8,
            repetition_penalty=penalty,
            # Half of such a logit is far less than any other.
            logit_bias=dict.fromkeys(LETTERS[:8], 90.0),
        )
        [output] = generate(llm, [prompt], asked)
        assert output.outputs[0].finish_reason == "stop"
        texts.append(output.outputs[0].text)
    assert all(re.fullmatch("[a-h]{6}", text) for text in texts), texts
    assert len(set(texts[1])) == 6 > len(set(texts[0])), texts


@pytest.mark.parametrize("strategy", ["semi_autoregressive", "dual_cache"])
def test_full_attention(room: EngineRoom, strategy: str) -> None:
    """Canvas after canvas, with guidance, and with a template, whose tokens are prompt."""
    dllm = {"strategy": strategy, "canvas_length": CANVAS}
    overlapped = strategy == "dual_cache"  # forwards that turn out to be too many
    llm = room.start("llada", dllm, overlapped, max_model_len=CONTEXT)
    model, numbers = plain_model("llada"), NUMBERS[strategy]
    rules = {"strategy": strategy, "canvas_length": CANVAS}
    texts, wishes = jobs(model, rules, numbers)
    if strategy == "semi_autoregressive":
        asked = numbers | {"cfg_scale": 0.7, "presence_penalty": 1.2}
        texts.append(Text(model, a_prompt(14, 3), 30, Rules(**rules | asked)))
        wishes.append(wish(30, asked))
    pins = a_prompt(12, 4)
    template = [*pins[:3], *[FILL] * 10, *pins[3:6], *[FILL] * 9, *pins[6:]]
    for penalties in PENALTIES:
        asked = numbers | penalties | {"block_length": 8}
        text = Text(model, a_prompt(10, 8), 25, Rules(**rules | asked))
        text.template = template
        texts.append(text)
        wishes.append(wish(25, asked, dllm_template=template))
    check(llm, texts, wishes, len(texts) - 3)


@pytest.mark.parametrize("name", ["llada2.1", "fast-dllm-v2"])
def test_grids(room: EngineRoom, name: str) -> None:
    """Edits see penalties, and so do first tokens of blocks; prompts end within blocks."""
    dllm = {"canvas_length": 64} if name == "llada2.1" else {}
    llm = room.start(name, dllm)
    model, numbers = plain_model(name), NUMBERS[name]
    rules: dict[str, Any] = {"strategy": "block_diffusion", "on_grid": True}
    if name == "fast-dllm-v2":
        rules |= {"strategy": "sub_blocks", "block_length": 32}
    texts, wishes = jobs(model, rules, numbers)
    check(llm, texts, wishes, 6)


def test_floating_canvases(room: EngineRoom) -> None:
    """By schedules of widths, with shifted logits, whose first row is kept."""
    numbers: dict[str, Any] = {"block_length": 8, "threshold": 0.6}
    dllm = {"strategy": "d2f", "adaptive": "throughput", "canvas_length": 40} | numbers
    llm = room.start("dream", dllm, async_scheduling=True)
    rules = {"strategy": "widths", "canvas_length": 40, "widths": (12, 3)} | numbers
    texts, _ = jobs(plain_model("dream"), rules, {})
    # No test compares samples of floating canvases with the plain loop.
    texts, wishes = [text for text in texts if not text.rules.temperature], []
    for text in texts:
        asked = {name: getattr(text.rules, name) for name in OF_VLLM}
        wishes.append(params(text.max_tokens, dllm_schedule=[12, 3], **asked))
    check(llm, texts, wishes, 6)
