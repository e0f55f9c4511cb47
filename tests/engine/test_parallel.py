"""Two ranks give the tokens of one."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import block_cases
import full_goldens
import httpx
import pytest
import test_grid_goldens
import test_schedules
import torch
from engines import CHECKPOINTS, a_prompt
from full_jobs import CONTEXT, FullJob
from jobs import MIXED, Job
from processes import KILLED_SOON, SETTINGS, offline, serving
from template_jobs import gap_job

from dllm_plugin.engine.worker.cpu_worker import DiffusionCPUWorker
from dllm_plugin.reference.text import FILL
from dllm_plugin.sampling.features.automata import Automata

pytestmark = [pytest.mark.usefixtures("template"), pytest.mark.slow]

D2F = {"strategy": "d2f"}
FULL, CHECKED, FLOATING = "semi_autoregressive", "llada2.1", "llada-d2f"
# Every second recorded case: other tests decode all of them on one rank.
CASES = block_cases.cases_of(CHECKED)[::2]
# A mixture under full attention, and blocks that divide the prompt from its end backwards.
RND1, A2D = "rnd1", "a2d-qwen3"
RND1_CASES = full_goldens.cases_of(RND1, FULL)[::2]
A2D_CASES = test_grid_goldens.cases_of(A2D)[::2]
VOCAB = 320
BY_COLUMNS = {"dream", FULL}  # as by default; the other one gathers whole rows


class NotingWorker(DiffusionCPUWorker):
    """Leaves a file per kind of logits: this rank, their width, and the sampler's first column.

    And one beside the folder once an automaton has looked at a canvas.
    """

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        folder = Path(self.vllm_config.additional_config["notes"])
        shard = self.model_runner.sampler.proposer.shard
        first = "none" if shard is None else shard.columns.first

        def note(
            _: torch.nn.Module, arguments: tuple[Any, ...], logits: torch.Tensor
        ) -> None:
            (folder / f"{self.rank} {logits.shape[1]} {first}").touch()

        self.get_model().logits_processor.register_forward_hook(note)
        automata = self.model_runner.sampler.features[Automata]
        forward = automata.forward

        def note_automaton(*arguments: Any) -> Any:
            (folder.parent / f"{folder.name} automaton {self.rank}").touch()
            return forward(*arguments)

        automata.forward = note_automaton


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WITH_GRAMMAR: list[tuple[list[int], dict[str, Any]]] = [
    (
        a_prompt(9 + i, i),
        {"max_tokens": 24, "ignore_eos": False, "structured_outputs": grammar} | more,
    )
    for i, (grammar, more) in enumerate(
        [
            ({"json": SCHEMA}, {}),
            ({"regex": "[a-f]{5,20}z"}, {"logprobs": 1}),
            ({"regex": "[a-f]{5,20}z"}, {"temperature": 1.0, "seed": 3}),
        ]
    )
]


def numbers_of(one: Job) -> dict[str, Any]:
    return {"dllm_block_length": one.block_length} | {
        f"dllm_{k}": v for k, v in one.numbers
    }


def full_jobs() -> list[FullJob]:
    """Full attention, one of them guided, and one with gaps to fill."""
    jobs = [
        FullJob(
            a_prompt(9 + 11 * i, i), 40 + 8 * i, {"policy": policy, "block_length": 16}
        )
        for i, policy in enumerate(("threshold", "entropy", "factor"))
    ]
    jobs[1].numbers["cfg_scale"] = 0.6
    gaps = [FILL] * 9 + [70, 71] + [FILL] * 12 + a_prompt(7, 2)
    return [
        *jobs,
        gap_job(a_prompt(17, 5), gaps, {"policy": "entropy", "block_length": 8}),
    ]


def with_grammar(**extra_args: str) -> list[tuple[list[int], dict[str, Any]]]:
    return [
        (prompt, given | {"extra_args": extra_args}) for prompt, given in WITH_GRAMMAR
    ]


# An automaton reads whole rows, so by columns the grammars take drafts.
BY_DRAFTS = with_grammar(dllm_grammar="drafts")
# The policy of the checkpoint replaces decided tokens, which an automaton cannot follow.
BY_AUTOMATA = with_grammar(dllm_grammar="automaton", dllm_policy="threshold")


def on_two_ranks(
    notes: Path,
    checkpoint: str,
    dllm: dict[str, Any],
    requests: list[tuple[list[int], dict[str, Any]]],
    **more: Any,
) -> dict[str, Any]:
    """A wish of :func:`processes.offline`; `notes` is made, and named as in `BY_COLUMNS`."""
    notes.mkdir()
    if notes.name not in BY_COLUMNS:
        dllm = dllm | {"vocab_parallel": False}
    engine = SETTINGS | {
        "model": str(CHECKPOINTS / f"tiny-{checkpoint}"),
        "enforce_eager": True,
    }
    engine |= {"tensor_parallel_size": 2, "worker_cls": "test_parallel.NotingWorker"}
    engine |= {"additional_config": {"dllm": dllm, "notes": str(notes)}} | more
    # Registering by hand beside the entry point is harmless.
    wants = [{"prompt": prompt, "params": given} for prompt, given in requests]
    return {"engine": engine, "requests": wants, "register": checkpoint == "dream"}


def asked(prompt: list[int], wish: Any) -> tuple[list[int], dict[str, Any]]:
    """A prompt and what a script needs of its parameters."""
    fields = ("max_tokens", "extra_args", "stop_token_ids")
    return prompt, {field: getattr(wish, field) for field in fields}


def with_schedules(notes: Path) -> dict[str, Any]:
    """A wish for floating canvases, whose widths the requests give."""
    family, strategy, block, canvas, _ = test_schedules.ENGINES[FLOATING]
    dllm = {"strategy": strategy, "adaptive": "throughput", "canvas_length": canvas}
    dllm |= {"block_length": block, "threshold": test_schedules.THRESHOLD}
    requests = [
        (prompt, {"max_tokens": tokens, "extra_args": {"dllm_schedule": widths}})
        for prompt, tokens, widths in test_schedules.requests(FLOATING)
    ]
    return on_two_ranks(notes / FLOATING, family, dllm, requests)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks leave theirs, in a folder per engine."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def answers(notes: Path) -> dict[str, list[list[int]]]:
    """Tokens of six engines, which one script starts after each other."""
    mixed = [
        (list(j.prompt), {"max_tokens": j.max_tokens, "extra_args": numbers_of(j)})
        for j in MIXED
    ]
    # One request needs whole rows while it runs, and the others none behind it.
    mixed[1][1]["logprobs"] = 1
    full = [
        (j.prompt, {"max_tokens": j.max_tokens, "extra_args": x})
        for j in full_jobs()
        for x in [j.wish().extra_args]
    ]
    checked = [asked(case["prompt_ids"], block_cases.wish(case)) for case in CASES]
    a2d = [
        asked(case["prompt_ids"], test_grid_goldens.wish(case)) for case in A2D_CASES
    ]
    rnd1 = [
        (case.prompt, {"max_tokens": case.max_tokens, "extra_args": case.arguments()})
        for case in RND1_CASES
    ]
    canvas = {"strategy": FULL, "canvas_length": 48}
    wishes = {
        "dream": on_two_ranks(notes / "dream", "dream", D2F, mixed + BY_DRAFTS),
        FULL: on_two_ranks(notes / FULL, "llada", canvas, full, max_model_len=CONTEXT),
        CHECKED: on_two_ranks(
            notes / CHECKED, CHECKED, {"canvas_length": 64}, checked + BY_AUTOMATA
        ),
        FLOATING: with_schedules(notes),
        RND1: on_two_ranks(notes / RND1, RND1, {"canvas_length": 64}, rnd1),
        A2D: on_two_ranks(notes / A2D, A2D, test_grid_goldens.CANVAS, a2d),
    }
    for name, checkpoint, dllm, wanted in (
        ("dream", "dream", D2F, BY_DRAFTS),
        (CHECKED, CHECKED, {"canvas_length": 64}, BY_AUTOMATA),
    ):
        alone = on_two_ranks(notes / f"{name} alone", checkpoint, dllm, wanted)
        alone["engine"] |= {
            "tensor_parallel_size": 1,
            "additional_config": {"dllm": dllm},
        }
        del alone["engine"]["worker_cls"]
        wishes[f"{name} alone"] = alone
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    variables |= KILLED_SOON
    return dict(zip(wishes, offline(*wishes.values(), **variables), strict=True))


def test_tensor_parallel(answers: dict[str, list[list[int]]]) -> None:
    """Ranks exchange results per row, and where the prompt ends, the row that is carried."""
    assert answers["dream"][: len(MIXED)] == [j.expected("dream")[0] for j in MIXED]


@pytest.mark.parametrize("name", ["dream", CHECKED])
def test_tensor_parallel_grammars(
    name: str, answers: dict[str, list[list[int]]], notes: Path
) -> None:
    """By drafts with the columns of a rank, and by automata with whole rows, on each rank."""
    alone = answers[f"{name} alone"]
    assert answers[name][-len(WITH_GRAMMAR) :] == alone and all(alone)
    ranks = {path.name.rpartition(" ")[2] for path in notes.glob(f"{name} automaton *")}
    assert ranks == ({"0", "1"} if name == CHECKED else set())


def test_tensor_parallel_full_attention(answers: dict[str, list[list[int]]]) -> None:
    """Each rank finds the same rows for its share of the LM head; guided pairs too.

    What a rank computes stays there: ranks exchange results per row.
    """
    assert answers[FULL] == [
        job.decode(("llada", FULL)).answer() for job in full_jobs()
    ]


def test_tensor_parallel_blocks(answers: dict[str, list[list[int]]]) -> None:
    """Two ranks share each expert of a mixture; blocks are checked, edited and stored alike.

    The logits are gathered.
    """
    assert answers[CHECKED][: len(CASES)] == [case["output_ids"] for case in CASES]


def test_tensor_parallel_of_other_families(
    answers: dict[str, list[list[int]]],
) -> None:
    """Recorded decodes of RND1 and of A2D by blocks."""
    assert answers[RND1] == [case.output for case in RND1_CASES]
    assert answers[A2D] == [test_grid_goldens.answer_of(case) for case in A2D_CASES]


def test_tensor_parallel_floating(answers: dict[str, list[list[int]]]) -> None:
    """Every rank commits the same run, whatever the width."""
    compared = 0
    wanted = test_schedules.requests(FLOATING)
    for (prompt, tokens, widths), got in zip(wanted, answers[FLOATING], strict=True):
        text = test_schedules.plain(FLOATING, prompt, tokens, widths)
        if text.margin > 3e-4:  # else a rounding may decide
            assert got == text.answer(), widths[:5]
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("name", ["dream", FULL, CHECKED])
@pytest.mark.usefixtures("answers")
def test_columns_of_a_rank(name: str, notes: Path) -> None:
    """By default each computes and keeps its half; without `vocab_parallel` it is given all."""
    half = VOCAB // 2
    expected = {f"{rank} {half} {rank * half}" for rank in range(2)}
    if name not in BY_COLUMNS:
        expected = {f"{rank} {VOCAB} none" for rank in range(2)}
    assert {note.name for note in (notes / name).iterdir()} == expected


def test_data_parallel(tmp_path: Path) -> None:
    """Both engines take part, and each answers as a single one.

    vLLM starts as many front ends; one says that the server is ready, and other middleware works.
    """
    options = [
        "--data-parallel-size=2",
        '--additional-config={"dllm": {"strategy": "d2f"}}',
    ]
    options += ["--middleware=starlette.middleware.gzip.GZipMiddleware"]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with serving(tmp_path / "log", *options, **variables) as server:

        def ask(one: Job) -> list[int]:
            answer = server.complete(
                list(one.prompt),
                max_tokens=one.max_tokens,
                ignore_eos=True,
                return_token_ids=True,
                vllm_xargs=numbers_of(one),
            )
            return list(answer["choices"][0]["token_ids"])

        with ThreadPoolExecutor(8) as pool:
            tokens = list(pool.map(ask, MIXED))
        steps = server.metrics("vllm:diffusion_num_denoising_steps_total")
        page = httpx.get(f"{server.url}/metrics", timeout=60)
        lines = server.log.read_text().splitlines()
    assert page.headers["Content-Encoding"] == "gzip"
    assert len([line for line in lines if line.startswith("diffuplug: ready")]) == 1
    assert tokens == [j.expected("llada")[0] for j in MIXED]
    assert sorted(steps) == ["0", "1"]
    assert min(steps.values()) > 0
