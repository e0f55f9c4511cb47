"""Test the measuring modes without an engine: refusals, windows, shapes, floor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from documented import ROOT
from transformers import AutoTokenizer

from diffuplug_bench import problems, report, worker_extension
from diffuplug_bench.cli import build_parser
from diffuplug_bench.model_shapes import SHAPES, Sizes, autoregressive_config
from diffuplug_bench.options import settings_of
from diffuplug_bench.request_loop import Answer, Arrival, Run, all_decode, steady_window
from diffuplug_bench.step import floor, measure, schedule
from diffuplug_bench.word_problems.generator import problems_of
from dllm_plugin import default_model


def answer(*arrivals: tuple[int, int]) -> Answer:
    return Answer([1] * 10, 0.0, [Arrival(*a) for a in arrivals], finished=True)


def test_window_holds_steps_of_all_requests_only() -> None:
    """Steps before both decode, and the tail, take a hundred times as long here."""
    run = Run(
        [
            answer((2, 4), (6, 4), (10, 4), (13, 4)),
            answer((4, 4), (8, 4), (12, 4), (15, 4)),
        ]
    )
    seconds, slow = 0.0, (0, 1, 2, 3, 4, 13, 14, 15)
    for i in range(16):
        seconds += 0.1 if i in slow else 0.001
        run.stamps.append(seconds)
    window = steady_window(run)
    assert (window.first, window.last) == (4, 12)
    assert window.step_ms == pytest.approx(1.0)
    assert measure._context(run, window) == 10 + (8 + 8) / 2


@pytest.mark.parametrize(
    ("last", "stages", "why"),
    [(9, 1, None), (17, 1, "preempted"), (9, 2, None), (17, 2, "for its last stage")],
)
def test_steps_of_a_pipeline_that_take_turns(
    last: int, stages: int, why: str | None
) -> None:
    words = ["step", "--shapes", "tiny", "--pipeline-parallel-size", str(stages)]
    settings = settings_of(build_parser().parse_args(words))
    one = answer((1, 16), (last, 16))
    one.token_ids, one.forwards = (
        [0] * 32,
        8 + measure.steps_per_block(settings, 32) + 1,
    )
    if why is None:
        measure._check(Run([one]), 32, settings, 32)
        return
    with pytest.raises(ValueError, match=why):
        measure._check(Run([one]), 32, settings, 32)


def test_all_decode_once_the_last_one_has_tokens() -> None:
    """Memory is counted, and a trace begins, behind the prompts."""
    run = Run([answer((2, 4), (6, 4)), answer((4, 4))])
    assert all_decode(run, 2) and not all_decode(run, 3)
    run.answers.append(answer())
    assert not all_decode(run, 3)


def test_requests_that_never_met_have_no_window() -> None:
    run = Run(
        [answer((2, 4), (6, 4)), answer((8, 4), (12, 4))], [0.1 * i for i in range(13)]
    )
    with pytest.raises(ValueError, match="never ran all at once"):
        steady_window(run)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llada-8b", 7.5, 2 * 32 * 4096 * 2),
        ("dream-7b", 7.07, 2 * 28 * 512 * 2),
        ("sdar-8b", 7.57, 2 * 36 * 1024 * 2),
    ],
)
def test_gemms_are_the_weights_that_the_models_have(
    name: str, billions: float, kv_bytes: int
) -> None:
    """Published sizes, less the embedding (and norms), which is no GEMM."""
    sizes = Sizes.of(SHAPES[name])
    layer = [*sizes.attention_gemms, *sizes.mlp_gemms(sizes.inner)]
    weights = sizes.layers * sum(n * k for n, k in layer) + sizes.vocab * sizes.width
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert sizes.kv_bytes(1, 2) == kv_bytes


def test_floor_counts_every_gemm_once() -> None:
    sizes = Sizes.of(SHAPES["tiny"])
    weights = floor._weights(sizes, torch.device("cpu"), torch.float32)
    run, work = floor._forward(sizes, weights, count=3)
    run()
    assert work == 2 * 3 * sum(w.numel() for layer in weights for w in layer)


def test_floor_of_experts_reads_those_that_are_hit() -> None:
    sizes = Sizes.of(SHAPES["llada2-mini"])
    assert floor._experts_hit(sizes, 1) == (8, 1)
    hit, rows = floor._experts_hit(sizes, 32)
    assert 150 < hit < 180 and hit * rows >= 32 * 8
    assert floor._experts_hit(sizes, 4096) == (256, 128)


def test_random_weights_have_the_size_of_trained_ones() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.RMSNorm(300))
    matrix, bias, norm = model.parameters()
    for values in (bias, norm):
        values.data.fill_(7.0)
    worker_extension.fill(model, 5)
    first = matrix.detach().clone()
    assert first.std().item() == pytest.approx(0.02, rel=0.02)
    assert not bias.any() and (norm == 1).all()
    worker_extension.fill(model, 6)
    assert (first != matrix).any()
    worker_extension.fill(model, 5)
    assert torch.equal(first, matrix)


def quantised_layer(dtype: torch.dtype, name: str, scale: str) -> torch.nn.Module:
    """Return a layer with 64 x 48 stored numbers, all equal, and a scale per row."""
    layer = torch.nn.Module()
    values = {name: torch.ones(64, 48).to(dtype), scale: torch.ones(64, 1)}
    values["weight_shape"] = torch.tensor([64, 48])
    for key, value in values.items():
        layer.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
    return layer


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "weight"),
        (torch.int8, "weight"),
        (torch.int32, "weight_packed"),
    ],
)
def test_quantised_weights_have_the_size_of_trained_ones(
    dtype: torch.dtype, name: str
) -> None:
    layer = quantised_layer(dtype, name, "weight_scale")
    worker_extension.fill(layer, 5)
    stored, scale, shape = layer.parameters()
    assert len(stored.to(torch.float64).unique()) > 50 and shape.tolist() == [64, 48]
    largest = worker_extension.LARGEST[dtype]
    assert scale.numpy() == pytest.approx(worker_extension.BOUND / largest)
    if dtype != torch.int32:  # which packs several numbers
        assert (stored.float() * scale).std().item() == pytest.approx(0.02, rel=0.05)


def test_scales_of_one_byte_are_exponents() -> None:
    layer = quantised_layer(torch.uint8, "weight", "weight_scale")
    exponents = torch.ones(64, 2, dtype=torch.uint8)
    layer.weight_scale = torch.nn.Parameter(exponents, requires_grad=False)
    worker_extension.fill(layer, 5)
    bound = 6 * 2.0 ** (int(layer.weight_scale[0, 0]) - 127)
    assert worker_extension.BOUND / 2 < bound < 2 * worker_extension.BOUND


def test_autoregressive_models_are_of_the_same_size() -> None:
    for name in ("llada-8b", "dream-7b", "sdar-8b", "tiny"):
        config: dict[str, Any] = SHAPES[name]
        assert Sizes.of(autoregressive_config(config)) == Sizes.of(config)
    with pytest.raises(ValueError, match="llada2_moe"):
        autoregressive_config(SHAPES["llada2-mini"])


def test_fractional_rates_are_an_average_of_whole_schedules() -> None:
    assert schedule.steps_of(6, block=16, rate=3.0) == [5, 5, 6, 5, 5, 6]
    assert schedule.steps_of(2, block=16, rate=3.0) == [5, 6]
    assert set(schedule.steps_of(50, block=32, rate=4.0)) == {8}
    assert sum(schedule.steps_of(270, block=16, rate=2.7)) == 1600
    assert set(schedule.steps_of(5, block=16, rate=16.0)) == {1}


@pytest.mark.parametrize("block", [1, 4, 16, 32, 64, 128])
def test_schedules_give_what_is_asked_for_or_are_refused(block: int) -> None:
    """Of any rate that a block can have, and so of the rounds that the refusal names."""
    for rate in (1 + (block - 1) * i / 60 for i in range(61)):
        for rounds in (1, 2, 3, schedule.MOST_REQUESTS):
            found = rounds * block / sum(schedule.steps_of(rounds, block, rate))
            close = abs(found / rate - 1) <= 0.02
            assert close or rounds < schedule.MOST_REQUESTS
            try:
                schedule.check(rate, 2 * block, rounds, [(block, (1, 4))])
            except ValueError as error:
                named = int(str(error).rsplit("--rounds ", 1)[1].rstrip("."))
                schedule.check(rate, 2 * block, named, [(block, (1, 4))])
                assert not close
            else:
                assert close


def test_sources_are_told_apart(tmp_path: Path) -> None:
    """Contents, names and where a text lies count; what is no source does not."""
    found = []
    for one, two in ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d")):
        (tmp_path / "inner").mkdir(exist_ok=True)
        (tmp_path / "inner" / "one.py").write_bytes(one)
        (tmp_path / "two.py").write_bytes(two)
        found.append(report.hash_of_sources(tmp_path))
    (tmp_path / "note.txt").write_text("no source")
    assert report.hash_of_sources(tmp_path) == found[-1]
    (tmp_path / "two.py").rename(tmp_path / "three.py")
    found.append(report.hash_of_sources(tmp_path))
    assert len(set(found)) == 4
    # Of the package that is measured, whatever the working folder.
    written = report._versions()["sources"]
    assert (
        written == report.hash_of_sources(ROOT / "dllm_plugin") and len(written) == 12
    )


def test_any_model_with_a_chat_template_is_scored() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(default_model.path())
    asked = problems_of(4)
    texts = [problem.answer for problem in asked[:3]] + ["no number here"]
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    for is_bundled in (True, False):
        assert problems.score(tokenizer, answers, asked, is_bundled) == {
            "accuracy": 0.75
        }
    for prompt, item in zip(
        problems.problem_prompts(tokenizer, asked), asked, strict=True
    ):
        assert item.question in tokenizer.decode(prompt) != item.question
    # Without a template there is no telling how to ask.
    tokenizer.chat_template = None
    assert (
        tokenizer.decode(problems.problem_prompts(tokenizer, asked)[0])
        == asked[0].question
    )
    unscored = problems.score(tokenizer, answers, asked, False)
    assert (
        unscored["accuracy"] is None and "no chat template" in unscored["accuracy_note"]
    )
    assert report.table_of("served", [unscored]).split() == ["accuracy", "-"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 7 = 12\n#### 12\nin 3 steps", 12),
        ("She has 5 and gets 7, so she has 12.", 12),
        ("The total is $1,200.00.", 1200),
        (r"Hence \boxed{-4}", -4),
        ("Pages 5-12", 12),
        ("no number", None),
    ],
)
def test_result_of_an_answer(text: str, number: int | None) -> None:
    """The bundled model was taught a mark, and without it has not answered."""
    assert problems.number_of(text, is_bundled=False) == number
    assert problems.number_of(text, is_bundled=True) == (
        number if "####" in text else None
    )
