"""Block diffusion equals its two-pass form, without the passes that only store a block."""

from typing import Any

from engines import EngineRoom, a_prompt, forwards, generate, params, results, token_ids

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import FAR, Rules
from dllm_plugin.reference.text import Result, Text

BLOCKS = {"strategy": "block_diffusion"}
WISHES: list[dict[str, Any]] = [
    {"policy": "threshold"},
    {"policy": "threshold", "threshold": 0.5},
    {"policy": "low_confidence"},
    {"policy": "low_confidence", "steps": 5},
    {"policy": "low_confidence", "steps": 40},
    {"policy": "entropy", "steps": 8},
    {"policy": "topk_margin", "steps": 3},
    {"policy": "factor"},
    {"policy": "factor", "factor": 0.4},
    {"policy": "random", "steps": 4, "seed": 12345},
    {"policy": "random", "steps": 16, "seed": 99},
]


def plain(
    model: PlainModel,
    prompt: list[int],
    size: int,
    tokens: int,
    wish: Any,
    canvas: int = FAR,
) -> Text:
    rules = Rules("block_diffusion", block_length=size, canvas_length=canvas, **wish)
    text = Text(model, prompt, tokens, rules)
    decode(text)
    return text


def two_pass(model: PlainModel, *job: Any) -> Result:
    """The loop with a canvas of one block, which is stored by a forward of its own."""
    return plain(model, *job, canvas=job[1]).result()


def num_commits(model: PlainModel, *job: Any) -> int:
    """Forwards that only store a block, in the two-pass form."""
    return two_pass(model, *job).forwards - plain(model, *job).result().forwards


def request(size: int, tokens: int, wish: dict[str, Any], **options: Any) -> Any:
    numbers = {f"dllm_{key}": value for key, value in wish.items() if key != "seed"}
    options |= {"seed": wish.get("seed"), "dllm_block_length": size} | numbers
    return params(tokens, **options)


def test_every_policy_in_one_batch(
    family: str, room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    llm, model = room.start(family, BLOCKS), plain_models[family]
    shapes = [(16, 48), (8, 20), (32, 40)]
    jobs = [
        (a_prompt(5 + 9 * i, i), *shapes[i % 3], wish) for i, wish in enumerate(WISHES)
    ]
    outputs = generate(
        llm, [job[0] for job in jobs], [request(*job[1:]) for job in jobs]
    )
    for (prompt, size, tokens, wish), output in zip(jobs, outputs, strict=True):
        text = plain(model, prompt, size, tokens, wish)
        assert (token_ids(output), forwards(output)) == text.result(), (wish, size)
        assert text.answer() == two_pass(model, prompt, size, tokens, wish).tokens


def test_a_stop_token_ends_the_text(
    family: str, room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    """A stop token inside a block ends the text as soon as everything left of it is decided."""
    llm, model, prompt = (
        room.start(family, BLOCKS),
        plain_models[family],
        a_prompt(21, 3),
    )
    wish: dict[str, Any] = {"policy": "low_confidence", "steps": 7}
    if family == "dream":
        wish["eps"] = 0.1
    text = plain(model, prompt, 16, 48, wish)
    stop = text.answer()[20]
    ended = Text(model, prompt, 48, text.rules, {stop})
    decode(ended)
    outputs = generate(
        llm,
        [prompt] * 2,
        [request(16, 48, wish), request(16, 48, wish, stop_token_ids=[stop])],
    )
    assert results(outputs) == [text.result(), ended.result()]
    assert outputs[1].outputs[0].finish_reason == "stop"


def test_a_canvas_of_one_block_stores_it_by_itself(
    family: str, room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    """Without room for the next block the storing pass is back, the tokens stay."""
    llm, model, prompt = (
        room.start(family, BLOCKS),
        plain_models[family],
        a_prompt(9, 5),
    )
    text = two_pass(model, prompt, 64, 130, {"threshold": 0.6})
    [output] = generate(
        llm, [prompt], request(64, 130, {"policy": "threshold", "threshold": 0.6})
    )
    assert (token_ids(output), forwards(output)) == text


def test_blocks_commit_by_themselves_if_many_requests_run(
    family: str, room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    """From four on each is fed a block per step; the last three ride along again."""
    llm, model = (
        room.start(family, BLOCKS | {"commit_alone_from": 4}),
        plain_models[family],
    )
    wish = {"policy": "low_confidence", "steps": 4}
    lengths = (16, 32, 48, 64, 160, 176, 192)
    prompts = [a_prompt(5 + 9 * i, i) for i in range(len(lengths))]
    jobs = [(p, 16, n, wish) for p, n in zip(prompts, lengths, strict=True)]
    texts = [plain(model, *job).result() for job in jobs]
    outputs = generate(llm, prompts, [request(16, n, wish) for n in lengths])
    alone = [
        forwards(output) - text.forwards
        for output, text in zip(outputs, texts, strict=True)
    ]
    assert [token_ids(output) for output in outputs] == [text.tokens for text in texts]
    # The fourth one ends after four blocks, three of which were stored.
    assert alone[:4] == [0, 1, 2, 3]
    assert all(3 <= passes <= 5 for passes in alone[4:])
    assert min(num_commits(model, *job) for job in jobs[4:]) > 5
    [output] = generate(llm, prompts[:1], request(16, 64, wish))
    assert forwards(output) == plain(model, *jobs[0][:2], 64, wish).result().forwards


def test_its_default_is_threshold(
    room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    llm, prompt = room.start("llada", BLOCKS), a_prompt(12, 6)
    text = plain(plain_models["llada"], prompt, 32, 64, {"threshold": 0.9})
    [output] = generate(llm, [prompt], params(64))
    assert (token_ids(output), forwards(output)) == text.result()
