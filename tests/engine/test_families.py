"""What the product promises, on an engine of each family that has no file of its own."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_targets
import torch
from engines import (
    CHECKPOINTS,
    EngineRoom,
    forwards,
    generate,
    letters,
    params,
    token_ids,
)
from made_checkpoints import MASK, make_a2d, parent_model
from test_requests_refused import refused
from test_watched import check_frames_and_early_text
from test_weight_updates import TRANSFER, halves, send
from trained_adapters import write_adapter
from trained_weights import trained

from dllm_plugin.commands.verify.second_opinion import Job, decode_job
from dllm_plugin.config.decode import DecodeConfig, get_decode_config
from dllm_plugin.reference.model import PlainModel

CANVAS, CONTEXT = 32, 160
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
BLOCKS = {"strategy": "block_diffusion", "block_length": 8}
TIED = {"tie_word_embeddings": True}


class Row(NamedTuple):
    """One engine of the tests.

    checkpoint  tiny checkpoint, or parent of an A2D that the test makes
    ends        tokens that end an answer, by their texts
    mask        text of the mask token; empty if the tokenizer has none
    adapters    whether requests can choose adapters: on CPUs no mixture can
    """

    checkpoint: str
    dllm: dict[str, Any]
    ends: tuple[str, ...]
    mask: str = "<|mask|>"
    adapters: bool = True


QWEN_ENDS = ("<|im_end|>",)
ROWS = {
    "llada-moe": Row(
        "llada-moe", {}, ("<|endoftext|>", "<|role_end|>"), adapters=False
    ),
    "rnd1": Row("rnd1", {}, QWEN_ENDS, mask="", adapters=False),
    "stable-diffcoder": Row("stable-diffcoder", {}, (), "<[MASK_TOKEN]>"),
    "a2d-qwen3-blocks": Row("a2d-qwen3", BLOCKS, QWEN_ENDS),
    "a2d-qwen2": Row("Qwen2", {}, QWEN_ENDS),
    "a2d-llama": Row("Llama", BLOCKS, QWEN_ENDS),
}


class Served(NamedTuple):
    """An engine and its checkpoint."""

    row: Row
    llm: Any
    folder: Path

    @property
    def config(self) -> DecodeConfig:
        return get_decode_config(self.llm.llm_engine.vllm_config)

    @property
    def eos(self) -> int:
        return int(self.llm.get_tokenizer().eos_token_id)

    def plain(self, prompt: list[int], tokens: int, **reading: Any) -> Any:
        """Answer and forwards of the plain loop."""
        model = PlainModel.load(self.folder, self.config.mask_token_id, **reading)
        stops = {self.config.hidden_token_id} - {None}
        job = Job(prompt, tokens, self.config, stops, CONTEXT)
        return decode_job(model, job, lambda step: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the checkpoints that no recorded decode has."""
    root = tmp_path_factory.mktemp("made")
    return {
        "Qwen2": make_a2d(root / "tiny-a2d-qwen2", "Qwen2", **TIED),
        "Llama": make_a2d(root / "tiny-a2d-llama", "Llama"),
    }


@pytest.fixture(scope="module", params=list(ROWS))
def served(
    request: pytest.FixtureRequest, room: EngineRoom, made: dict[str, Path]
) -> Iterator[Served]:
    """An engine of each row, with steps that are launched ahead."""
    row = ROWS[request.param]
    folder = made.get(row.checkpoint) or CHECKPOINTS / f"tiny-{row.checkpoint}"
    llm = room.start(
        dllm={"canvas_length": CANVAS} | row.dllm,
        async_scheduling=True,
        model=str(folder),
        max_model_len=CONTEXT,
        **(LORA if row.adapters else {}),
        **TRANSFER,
    )
    yield Served(row, llm, folder)


def test_answers_are_those_of_the_plain_loop(served: Served) -> None:
    """Each alone and in a batch."""
    prompts = [letters(5 + 6 * i, i) for i in range(4)]
    together = generate(served.llm, prompts, params(21))
    for prompt, output in zip(prompts, together, strict=True):
        wanted = served.plain(prompt, 21)
        assert (token_ids(output), forwards(output)) == wanted
        [alone] = generate(served.llm, [prompt], params(21))
        assert (token_ids(alone), forwards(alone)) == wanted


def test_seeds_and_logprobs_do_not_depend_on_the_batch(served: Served) -> None:
    hot = {"temperature": 0.9, "logprobs": 2}
    wishes = [params(18, seed=seed, **hot) for seed in (5, 6)] + [params(18)]
    prompts = [letters(11), letters(11), letters(30, 2)]
    first, second, _ = generate(served.llm, prompts, wishes)
    assert token_ids(first) != token_ids(second)
    [alone] = generate(served.llm, prompts[:1], wishes[0])
    assert token_ids(alone) == token_ids(first)
    scored = first.outputs[0].logprobs
    for token, place in zip(token_ids(first), scored, strict=True):
        assert token in place and place[token].logprob <= 0


def test_text_streams_and_ends_at_every_end(served: Served) -> None:
    tokenizer, engine = served.llm.get_tokenizer(), served.llm.llm_engine
    engine.add_request("long", {"prompt_token_ids": letters(9)}, params(44))
    seen: list[list[int]] = []
    while engine.has_unfinished_requests():
        seen += [token_ids(output) for output in engine.step()]
    assert len(seen) > 1
    assert len(seen[-1]) == 44 or served.config.hidden_token_id is not None
    for before, after in zip(seen, seen[1:], strict=False):
        assert after[: len(before)] == before
    ends = {served.eos, *tokenizer.convert_tokens_to_ids(list(served.row.ends))}
    for end in ends:
        wish = params(2, ignore_eos=False, logit_bias={end: 100.0})
        # Only after a prompt with turns does the end of a turn end an answer.
        [output] = generate(served.llm, [[end, *letters(9)]], wish)
        assert token_ids(output) == [end]
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("decoding", ["drafts", "automaton"])
def test_structured_output(served: Served, decoding: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    regex = r"[a-e]{4,9};[0-9]+"
    grammar = StructuredOutputsParams(regex=regex)
    wish = params(
        24, ignore_eos=False, structured_outputs=grammar, dllm_grammar=decoding
    )
    for output in generate(served.llm, [letters(9), letters(17, 1)], wish):
        text = output.outputs[0].text
        if output.outputs[0].finish_reason == "stop":
            assert re.fullmatch(regex, text), text
        else:
            assert re.match(r"[a-e]{4,9};[0-9]*", text), text


def test_an_answer_that_the_context_cuts(served: Served) -> None:
    """RND1's is refused: its last position is given, and would lie outside."""
    prompt, wish = letters(CONTEXT - 10), params(20)
    if served.config.reserved:
        message = f"{CONTEXT - 10} tokens and max_tokens 20 positions"
        with pytest.raises(refused(), match=message):
            generate(served.llm, [prompt], wish)
        return
    [output] = generate(served.llm, [prompt], wish)
    assert len(token_ids(output)) == 10 or served.config.hidden_token_id is not None


def test_gaps(served: Served) -> None:
    """Pins come back in their places; block-causal methods refuse a template."""
    template = [-1] * 5 + letters(3, 1) + [-1] * 4 + letters(6, 2)
    wish = params(12, dllm_template=template)
    if not served.config.method.full_attention:
        with pytest.raises(refused(), match="dllm_template needs"):
            generate(served.llm, [letters(9)], wish)
        return
    [output] = generate(served.llm, [letters(9)], wish)
    assert len(token_ids(output)) == 12
    assert token_ids(output)[5:8] == letters(3, 1)
    moved = params(12, dllm_template=template[:12] + letters(6, 5))
    [other] = generate(served.llm, [letters(9)], moved)
    assert token_ids(other) != token_ids(output), "the text after the gap is seen"


def test_mask_text_in_a_prompt(served: Served) -> None:
    """It is refused if the tokenizer makes a mask of it, else it is text as any."""
    text = f"a {served.row.mask or '<|mask|>'} b"
    if served.row.mask:
        with pytest.raises(refused(), match="mask token"):
            served.llm.generate(text, params(4), use_tqdm=False)
        return
    [output] = served.llm.generate(text, params(4), use_tqdm=False)
    assert served.config.mask_token_id not in output.prompt_token_ids
    assert len(token_ids(output)) == 4


def test_requests_choose_adapters(served: Served, tmp_path: Path) -> None:
    """The answer of the plain model with the adapter merged."""
    from vllm.lora.request import LoRARequest

    if not served.row.adapters:
        pytest.skip("a mixture on a CPU")
    targets = ["q_proj", "o_proj", "down_proj"]
    adapter = write_adapter(tmp_path / "adapter", served.folder, targets)
    chosen = LoRARequest("adapter", 1, str(adapter))
    [output] = served.llm.generate(
        {"prompt_token_ids": letters(13)},
        params(16),
        use_tqdm=False,
        lora_request=chosen,
    )
    wanted = served.plain(letters(13), 16, adapter=adapter)
    assert (token_ids(output), forwards(output)) == wanted
    assert wanted.tokens != served.plain(letters(13), 16).tokens


def test_frames_and_early_text(served: Served) -> None:
    paced = not served.config.method.full_attention
    check_frames_and_early_text(served.llm, paced)


def test_given_tokens_have_log_probabilities(served: Served) -> None:
    """Those of a plain forward, by which likelihoods are estimated; else they are refused."""
    jobs = test_targets.jobs()
    wishes = [test_targets.target_params(text, masked) for _, text, masked in jobs]
    if not served.config.method.full_attention:
        wishes[0].extra_args.pop("dllm_template")
        sees = "a model that sees the text after a gap"
        if not served.config.family.absolute_grid:
            sees = "full attention: under strategy 'block_diffusion'"
        with pytest.raises(refused(), match=f"dllm_targets needs {sees}"):
            generate(served.llm, [jobs[0][0]], wishes[0])
        return
    model = PlainModel.load(served.folder, served.config.mask_token_id)
    outputs = generate(served.llm, [context for context, _, _ in jobs], wishes)
    test_targets.check(model, outputs)


def test_new_weights_in_place(served: Served, tmp_path: Path) -> None:
    """In two halves that share layers; then the old ones again."""
    if not (served.folder / "model.safetensors").exists():
        pytest.skip("from several files, as another A2D")
    new = trained(served.folder, tmp_path)
    for folder in (new, served.folder):
        send(served.llm, folder, *halves(folder))
        served.llm.reset_prefix_cache()
        [output] = generate(served.llm, [letters(14)], params(20))
        wanted = served._replace(folder=folder).plain(letters(14), 20)
        assert (token_ids(output), forwards(output)) == wanted


@pytest.mark.parametrize("parent", ["Qwen2", "Llama"])
def test_made_checkpoints_compute_as_transformers_does(
    parent: str, made: dict[str, Path]
) -> None:
    """Under full attention, from several files, with tied and untied heads."""
    ids, tied = letters(24), TIED if parent == "Qwen2" else {}
    model = parent_model(parent, attn_implementation="eager", **tied)
    sees_all = torch.zeros(1, 1, len(ids), len(ids))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), attention_mask=sees_all).logits[0]
    found = PlainModel.load(made[parent], MASK).predictions(ids, [0] * len(ids))
    torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0)
