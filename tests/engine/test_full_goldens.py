"""Recorded traces of the full-attention reference decoders on the real engine, call by call."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    MASK_IDS,
    EngineRoom,
    a_prompt,
    at_most,
    forwards,
    generate,
    num_preemptions,
    one_of_each,
    params,
    token_ids,
)
from full_goldens import CANVAS, FILES, Case, cases_of
from full_jobs import DECODERS, Decoder, run_interrupted
from safetensors.torch import save_file

from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.numbers import llada_quota
from dllm_plugin.reference.text import Forward

# Few and many of each strategy.
IN_FLIGHT = {"llada": 16, "llada-moe": 4, "rnd1": 16, "dream": 4}
of_two_families = pytest.mark.parametrize(
    "decoder", DECODERS, ids="-".join, scope="module"
)
every_decoder = pytest.mark.parametrize("decoder", FILES, ids="-".join, scope="module")


def start(room: EngineRoom, decoder: Decoder, **options: Any) -> Any:
    family, strategy = decoder
    return room.start(
        family, {"strategy": strategy, "canvas_length": CANVAS}, **options
    )


def wish_for(case: Case) -> Any:
    return params(case.max_tokens, temperature=case.temperature, **case.arguments())


def check(case: Case, output: Any) -> None:
    assert token_ids(output) == case.output, case.name
    assert forwards(output) == case.record["num_forwards"], case.name


class PassSpy:
    """Queries, visible slots and LM-head rows of every forward, and the first one's logits."""

    def __init__(self, llm: Any, mask_id: int) -> None:
        worker = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        )
        self.model, self.mask_id = worker.model_runner.model, mask_id
        self.calls: list[tuple[int, int, int]] = []
        self.rows: list[int] = []
        self.requests = 1
        self.first_logits: torch.Tensor | None = None

    def __enter__(self) -> "PassSpy":
        self.handle = self.model.register_forward_hook(self._note, with_kwargs=True)
        self.compute_logits = self.model.compute_logits
        self.model.compute_logits = self._count
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.remove()
        del self.model.compute_logits

    def _count(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.rows.append(len(hidden))
        return self.compute_logits(hidden, *args, **kwargs)

    def _note(
        self, model: Any, args: Any, kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> None:
        from vllm.forward_context import get_forward_context

        positions = kwargs["positions"]
        [metadata] = {
            id(m): m for m in get_forward_context().attn_metadata.values()
        }.values()
        [kv_len] = set(metadata.seq_lens.tolist())
        first, last = int(positions.min()), int(positions.max())
        self.requests = len(positions) // (last - first + 1)
        spans = [*range(first, last + 1)] * self.requests
        assert positions.tolist() == spans, (
            "one span for each request, and nothing else"
        )
        self.calls.append((first, last - first + 1, kv_len))
        if self.first_logits is None:
            logits = self.compute_logits(hidden).unflatten(0, (self.requests, -1))
            # The partner of a guided request has a prompt of masks.
            lead = kwargs["input_ids"].view(self.requests, -1)[:, 0]
            self.first_logits = logits[
                int((lead != self.mask_id).int().argmax())
            ].clone()


def check_passes(case: Case, spy: PassSpy, passes: list[Forward]) -> None:
    """Every forward of a request that was alone, against the recorded and the plain ones."""
    wanted = [(c["q_start"], c["q_len"], c["kv_len"]) for c in case.record["forwards"]]
    assert spy.calls == wanted, case.name
    assert spy.requests == (2 if case.numbers().get("cfg_scale", 0) > 0 else 1), (
        case.name
    )
    rows = [spy.requests * len(one.rows) for one in passes]
    if (
        case.is_rnd1
    ):  # of its first forward the host knows the block, given tokens included
        rows[0] = case.max_tokens
    assert spy.rows == rows, case.name
    assert spy.first_logits is not None
    for position, row in case.first_logits().items():
        torch.testing.assert_close(spy.first_logits[position], row, atol=5e-4, rtol=0)


@every_decoder
def test_each_alone(
    decoder: Decoder, room: EngineRoom, plain_models: dict[str, PlainModel]
) -> None:
    """One of each setting; all of them run together below."""
    family, _ = decoder
    llm = start(room, decoder, max_num_seqs=16)
    cases = [case for case in cases_of(*decoder) if not case.is_random]
    for case in one_of_each(cases, lambda case: case.record["settings"]):
        with PassSpy(llm, MASK_IDS[family]) as spy:
            [output] = generate(llm, [case.prompt], wish_for(case))
        check(case, output)
        check_passes(case, spy, case.decode(plain_models[family]).forwards)


@every_decoder
def test_a_mask_in_the_prompt_is_refused(decoder: Decoder, room: EngineRoom) -> None:
    """Also as literal text, if the tokenizer knows the mask."""
    from vllm.exceptions import VLLMValidationError

    family, _ = decoder
    llm, mask_id = start(room, decoder, max_num_seqs=16), MASK_IDS[family]
    text = llm.get_tokenizer().decode([mask_id])
    for prompt in ({"prompt_token_ids": [1, mask_id]}, f"a {text} b"):
        if text or not isinstance(prompt, str):
            with pytest.raises(VLLMValidationError, match=f"mask token .id {mask_id}"):
                llm.generate([prompt], params(8), use_tqdm=False)


def recorded_draws(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Let the plugin read a case's numbers where it would draw its own."""
    from dllm_plugin.kernels.confidence import reference
    from dllm_plugin.sampling import decider

    def uniform(seed: Any, position: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        position, step = torch.broadcast_tensors(position, step)
        end = len(case.prompt) + case.max_tokens
        spots = zip(position.flatten().tolist(), step.flatten().tolist(), strict=True)
        # Decided positions and those behind the canvas are asked for, too, and not read.
        draws = [case.uniform(*spot) if spot[0] < end else 0.5 for spot in spots]
        return torch.tensor(draws).view(position.shape)

    def gumbel(
        seed: Any, position: torch.Tensor, step: torch.Tensor, size: int, first: int
    ) -> torch.Tensor:
        assert first == 0, "recorded for whole rows"
        spots = zip(position.tolist(), step.tolist(), strict=True)
        rows = [case.noise(*spot) for spot in spots]
        return torch.stack(rows) if rows else torch.zeros(0, size, dtype=torch.float64)

    if case.record.get("noise_kind") == "gumbel":
        monkeypatch.setattr(reference, "gumbel_uniform", gumbel)
    else:
        monkeypatch.setattr(decider, "counter_uniform", uniform)


@of_two_families
def test_recorded_random_numbers(
    decoder: Decoder,
    room: EngineRoom,
    plain_models: dict[str, PlainModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random remasking, Gumbel noise and Dream's random transfers, with the references' draws."""
    family, _ = decoder
    for case in [case for case in cases_of(*decoder) if case.is_random]:
        llm = start(room, decoder, max_num_seqs=16)
        with monkeypatch.context() as patch, PassSpy(llm, MASK_IDS[family]) as spy:
            recorded_draws(patch, case)
            [output] = generate(llm, [case.prompt], wish_for(case))
        check(case, output)
        check_passes(case, spy, case.decode(plain_models[family]).forwards)


def gumbel_case(
    file: Path, model: PlainModel, prompt: list[int], shape: dict[str, Any]
) -> Case:
    """What LLaDA's loop makes of a prompt, recorded as the references' calls are."""
    draw = torch.Generator().manual_seed(5)
    tokens = prompt + [model.mask_id] * shape["gen_length"]
    blocks = shape["gen_length"] // shape["block_length"]
    steps, forwards, rows = shape["steps"] // blocks, [], {}
    for low in range(len(prompt), len(tokens), shape["block_length"]):
        block = range(low, low + shape["block_length"])
        for step in range(steps):
            logits = model.rows_at(0, tokens, {})
            noise = torch.rand(logits.shape, dtype=torch.float64, generator=draw)
            rows[f"made/uniform_noise_{len(forwards)}"] = noise
            rows.setdefault("made/first_logits", logits.clone())
            logits[:, model.mask_id] = float("-inf")
            noisy = logits.double().exp() / (-noise.log()) ** shape["temperature"]
            best, sure = noisy.argmax(-1), logits.softmax(-1)
            left = [p for p in block if tokens[p] == model.mask_id]
            left.sort(key=lambda p: -float(sure[p, best[p]]))
            new = [
                [p, int(best[p])] for p in left[: llada_quota(len(block), steps, step)]
            ]
            for position, token in new:
                tokens[position] = token
            size = len(tokens)
            forwards.append(
                {"q_start": 0, "q_len": size, "kv_len": size, "new": sorted(new)}
            )
    rows["made/first_logits_rows"] = torch.arange(len(tokens))
    save_file(rows, f"{file}.logits.safetensors")
    record = {
        "id": "made",
        "prompt_ids": prompt,
        "settings": shape,
        "forwards": forwards,
    }
    record |= {"output_ids": tokens[len(prompt) :], "num_forwards": len(forwards)}
    return Case(str(file), "semi_autoregressive", record | {"noise_kind": "gumbel"})


def test_recorded_noise_of_several_blocks(
    room: EngineRoom,
    plain_models: dict[str, PlainModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Made by hand: the noise is numbered by the forwards of the whole text."""
    model, shape = (
        plain_models["llada"],
        {"gen_length": 24, "block_length": 8, "steps": 12},
    )
    case = gumbel_case(
        tmp_path / "made", model, a_prompt(7, 3), shape | {"temperature": 0.7}
    )
    text = case.decode(model)
    assert text.answer() == case.record["output_ids"] and text.margin > 1e-4
    llm = start(room, ("llada", "semi_autoregressive"), max_num_seqs=16)
    with PassSpy(llm, MASK_IDS["llada"]) as spy:
        recorded_draws(monkeypatch, case)
        [output] = generate(llm, [case.prompt], wish_for(case))
    check(case, output)
    check_passes(case, spy, text.forwards)


def shuffled(decoder: Decoder, seed: int) -> list[Case]:
    cases = [case for case in cases_of(*decoder) if not case.is_random]
    random.Random(seed).shuffle(cases)
    return cases


@every_decoder
def test_together_in_shuffled_order(decoder: Decoder, room: EngineRoom) -> None:
    in_flight = IN_FLIGHT[decoder[0]]
    llm, cases = start(room, decoder, max_num_seqs=16), shuffled(decoder, in_flight)
    with at_most(llm, in_flight):
        outputs = generate(
            llm, [case.prompt for case in cases], [wish_for(case) for case in cases]
        )
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@pytest.mark.parametrize(
    "decoder", [("llada-moe", "dual_cache"), ("rnd1", "semi_autoregressive")]
)
def test_mixtures_with_steps_launched_ahead(decoder: Decoder, room: EngineRoom) -> None:
    llm = start(room, decoder, async_scheduling=True, max_num_seqs=16)
    cases = shuffled(decoder, 7)
    prompts = [case.prompt for case in cases]
    outputs = generate(llm, prompts, [wish_for(case) for case in cases])
    for case, output in zip(cases, outputs, strict=True):
        check(case, output)


@of_two_families
def test_preempted_in_the_middle_of_their_blocks(
    decoder: Decoder, room: EngineRoom
) -> None:
    """All of them at once; the longest block takes 32 steps, so every round finishes some."""
    llm, cases = start(room, decoder, max_num_seqs=16), shuffled(decoder, 1)
    before = num_preemptions(llm)
    outputs = run_interrupted(
        llm, [(case.prompt, wish_for(case)) for case in cases], every=35
    )
    assert num_preemptions(llm) > before
    for case, output in zip(cases, outputs, strict=True):
        assert token_ids(output) == case.record["output_ids"], case.name
        assert forwards(output) >= case.record["num_forwards"], case.name
