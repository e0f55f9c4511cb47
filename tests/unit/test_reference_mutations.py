"""Each plain loop can fail: with one constant changed it misses the recorded decodes."""

import json
import math
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dllm_plugin import reference
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules

PACKAGE = "dllm_plugin.reference"
GOLDENS = Path(__file__).parents[1] / "goldens"
MODULES = (
    *("proposing", "blocks", "sub_blocks", "full_attention", "exact_blocks"),
    "widths",
)
PROMPT, COUNT = [30 + 7 * i % 90 for i in range(25)], 12


class Case(NamedTuple):
    """A prompt, the rules of its loop, and the recorded answer and forwards."""

    model: PlainModel
    prompt: list[int]
    rules: Rules
    answer: list[int]
    forwards: list[dict[str, Any]] | None
    stop: set[int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The GEMMs are tiny: several threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model_of(name: str) -> PlainModel:
    return PlainModel.load(GOLDENS / "checkpoints" / f"tiny-{name}")


D2F_POLICIES = {
    "default": "threshold",
    "neg_entropy": "entropy",
    "margin_confidence": "topk_margin",
}


def d2f(trace: str, record: dict[str, Any]) -> Case:
    settings, eos = record["settings"], record["eos_id"]
    rules = Rules(
        "d2f",
        D2F_POLICIES[settings.get("sampling_strategy", "default")],
        settings["block_size"],
        threshold=settings["skip_threshold"],
        block_add_threshold=settings["block_add_threshold"],
        decoded_token_threshold=settings["decoded_token_threshold"],
    )
    answer = list(record["output_ids"])
    if eos in answer:
        answer = answer[: answer.index(eos) + 1]
    model = model_of(trace.removeprefix("d2f_"))
    return Case(model, record["prompt_ids"], rules, answer, None, {eos})


ON_GRID = {
    "sdar_static": ("sdar", "low_confidence"),
    "sdar_dynamic": ("sdar", "threshold"),
    "llada2_threshold": ("llada2.0", "threshold"),
    "llada21_joint": ("llada2.1", "joint_threshold"),
    "fast_dllm": ("fast-dllm-v2", "threshold"),
}


def on_grid(trace: str, record: dict[str, Any]) -> Case:
    settings, (model, policy) = record["settings"], ON_GRID[trace]
    names = ("editing_threshold", "max_post_steps", "num_to_transfer")
    given = {name: settings[name] for name in names if name in settings}
    rules = Rules(
        "sub_blocks" if trace == "fast_dllm" else "block_diffusion",
        policy,
        settings.get("block_length") or settings["block_size"],
        canvas_length=64,
        on_grid=True,
        threshold=settings.get("threshold", settings.get("confidence_threshold", 0.9)),
        steps=settings.get("denoising_steps") or settings.get("steps"),
        sub_block_length=settings.get("small_block_size"),
        **given,
    )
    stop = {settings.get("eos_id", settings.get("stop_token", -1))}
    prompt, answer = record["prompt_ids"], record["output_ids"]
    return Case(model_of(model), prompt, rules, answer, None, stop)


EXACT = {
    "stable_diffcoder_quota": "low_confidence",
    "stable_diffcoder_threshold": "threshold",
}


def exact(trace: str, record: dict[str, Any]) -> Case:
    settings, size = record["settings"], record["settings"]["block_length"]
    blocks = settings["gen_length"] // size
    rules = Rules(
        "exact_blocks",
        EXACT[trace],
        size,
        canvas_length=64,
        on_grid=True,
        exact_end=True,
        threshold=settings["threshold"] or 0.9,
        steps=settings["steps"] // blocks,
    )
    model = model_of("stable-diffcoder")
    prompt, answer = record["prompt_ids"], record["output_ids"]
    return Case(model, prompt, rules, answer, None, set())


ROUNDED = {"a2d_mdlm": "semi_autoregressive", "a2d_bd3lm": "exact_blocks"}


def rounded(trace: str, record: dict[str, Any]) -> Case:
    settings, count = record["settings"], record["settings"]["max_new_tokens"]
    size, by_blocks = settings["block_size"], trace == "a2d_bd3lm"
    steps = math.ceil(settings["steps"] / math.ceil(count / size))
    rules = Rules(
        ROUNDED[trace],
        "low_confidence",
        size,
        canvas_length=256,
        exact_end=True,
        rounded=True,
        splits_prompt=by_blocks,
        steps=settings.get("steps_per_block") or steps,
    )
    prompt, answer = record["prompt_ids"], record["output_ids"]
    forwards = None if by_blocks else record["forwards"]
    return Case(model_of("a2d-qwen3"), prompt, rules, answer, forwards, set())


FULL = {
    "llada_vanilla": "semi_autoregressive",
    "llada_fast_nocache": "semi_autoregressive",
    "llada_prefix_cache": "prefix_cache",
    "llada_dual_cache": "dual_cache",
    "llada_dual_cache_factor": "dual_cache",
    "dream_maskgit_plus": "semi_autoregressive",
    "dream_threshold_nocache": "semi_autoregressive",
    "dream_dual_cache_entropy": "dual_cache",
}
ALGORITHMS = {"entropy": "entropy", "confidence_threshold": "threshold"}


def full_attention(trace: str, record: dict[str, Any]) -> Case:
    settings, answer = record["settings"], record["output_ids"]
    policy = ALGORITHMS.get(settings.get("alg"), "low_confidence")
    size = settings.get("block_length", len(answer))
    for name in ("threshold", "factor"):
        policy = name if name in settings else policy
    names = ("threshold", "factor", "eps", "top_p", "top_k")
    given = {name: settings[name] for name in names if name in settings}
    steps = settings["steps"] * size // len(answer)
    rules = Rules(FULL[trace], policy, size, 64, steps=steps, **given)
    model = model_of(trace.partition("_")[0])
    return Case(model, record["prompt_ids"], rules, answer, record["forwards"], set())


def widths() -> list[Case]:
    """The narrowest widths: LLaDA's decide blocks of one, Dream's are those of GPT."""
    model, blocks = model_of("llada"), Rules("block_diffusion", block_length=1)
    answer = Loops().decode(model, PROMPT, COUNT, blocks, set()).answer()
    rules = Rules("widths", block_length=32, canvas_length=32, widths=(1, 2))
    cases = [Case(model, PROMPT, rules, answer, None, set())]
    model, tokens = model_of("dream"), list(PROMPT)
    for i in range(COUNT):
        blocks_seen = [0] * len(PROMPT) + list(range(1, i + 2))
        row = model.predictions([*tokens, model.mask_id], blocks_seen)[-1]
        row[model.mask_id] = float("-inf")
        tokens.append(int(row.argmax()))
    rules = Rules("widths", block_length=32, canvas_length=32, widths=(1,))
    cases.append(Case(model, PROMPT, rules, tokens[len(PROMPT) :], None, set()))
    return cases


@cache
def cases_of(trace: str) -> list[Case]:
    if trace == "widths":
        return widths()
    readers = dict.fromkeys(FULL, full_attention) | dict.fromkeys(ON_GRID, on_grid)
    readers |= dict.fromkeys(EXACT, exact) | dict.fromkeys(ROUNDED, rounded)
    read = readers.get(trace, d2f)
    records = json.loads((GOLDENS / f"{trace}.json").read_text())["cases"]
    if trace in FULL:
        apart = {"remasking", "temperature", "cfg_scale"}
        records = [r for r in records if not apart & set(r["settings"])]
    if trace in EXACT:
        # An answer that a stop token cuts does not tell where blocks end.
        records = [r for r in records if "eos_id" not in r["settings"]]
    if trace in ROUNDED:
        records = [r for r in records if r["id"].startswith("s")]
    return [read(trace, record) for record in records]


class Loops:
    """The modules of the loops, read anew, with one text of one module replaced."""

    def __init__(self, module: str = "", old: str = "", new: str = "") -> None:
        self.modules: dict[str, types.ModuleType] = {}
        folder = Path(reference.__file__).parent
        for name in MODULES:
            source = (folder / f"{name}.py").read_text()
            if name == module:
                assert source.count(old) == 1, f"{old!r} is not there once"
                source = source.replace(old, new)
            self._load(name, source)
        self._load("loops", (folder / "loops.py").read_text())

    def _load(self, name: str, source: str) -> None:
        """Run a source in a module of its own that imports the other ones read here."""
        full = f"{PACKAGE}.{name}"
        module = types.ModuleType(full)
        with pytest.MonkeyPatch.context() as patch:
            for other, loaded in self.modules.items():
                patch.setitem(sys.modules, f"{PACKAGE}.{other}", loaded)
            exec(compile(source, full, "exec"), module.__dict__)
        self.modules[name] = module

    def decode(
        self,
        model: PlainModel,
        prompt: list[int],
        max_tokens: int,
        rules: Rules,
        stop: set[int],
    ) -> Any:
        text = self.modules["loops"].Text(model, prompt, max_tokens, rules, stop, 512)
        self.modules["loops"].decode(text)
        return text

    def agrees(self, case: Case) -> bool:
        """Whether a case is decoded as recorded; a loop that cannot go on is not."""
        length = len(case.answer)
        try:
            text = self.decode(case.model, case.prompt, length, case.rules, case.stop)
        except (IndexError, KeyError, AssertionError, RuntimeError):
            return False
        if text.answer() != case.answer:
            return False
        if case.rules.strategy == "widths" and len(text.forwards) != COUNT:
            return False
        if case.forwards is None:
            return True
        names = ("q_start", "q_len", "kv_len", "new")
        wanted = [tuple(one[name] for name in names) for one in case.forwards]
        return [(f.start, f.length, f.keys, f.new) for f in text.forwards] == wanted


TRACES = ("d2f_llada", "d2f_dream", *ON_GRID, *EXACT, *ROUNDED, *FULL, "widths")


@pytest.mark.parametrize("trace", TRACES)
def test_the_loops_agree_with_the_records(trace: str) -> None:
    cases, loops = cases_of(trace), Loops()
    assert cases and [loops.agrees(case) for case in cases] == [True] * len(cases)


# trace, module, and one constant of its loop
MUTATIONS = [
    (
        "d2f_llada",
        "blocks",
        "found[p].confidence > limit]",
        "found[p].confidence < limit]",
    ),
    (
        "d2f_llada",
        "blocks",
        "decided_share(text, opened - 1) >= ",
        "decided_share(text, opened - 1) > -",
    ),
    ("d2f_dream", "blocks", "    found = {first}", "    found = {first + 1}"),
    ("sdar_static", "blocks", "step >= text.steps - 1", "step >= text.steps - 2"),
    (
        "sdar_static",
        "blocks",
        "(step < size % text.steps)",
        "(step <= size % text.steps)",
    ),
    ("sdar_dynamic", "blocks", "if len(sure) >= quota", "if len(sure) > quota + 1"),
    (
        "llada2_threshold",
        "blocks",
        "quota = int(i in full)\n            if i == active[0]",
        "quota = int(i in full)\n            if i == active[0] + 1",
    ),
    (
        "llada21_joint",
        "blocks",
        "proposal.confidence > limit:",
        "proposal.confidence < limit:",
    ),
    (
        "fast_dllm",
        "sub_blocks",
        "step = 0 if len(written) == len(rows) else step + 1",
        "step = step + 9",
    ),
    ("fast_dllm", "sub_blocks", "text.predict()[-1:]", "text.predict()[-2:-1]"),
    (
        "stable_diffcoder_quota",
        "exact_blocks",
        "size, step = len(left), 0",
        "size, step = end - start, 0",
    ),
    (
        "stable_diffcoder_threshold",
        "full_attention",
        "if score >= limit",
        "if score >= limit / 2",
    ),
    (
        "a2d_mdlm",
        "full_attention",
        "end = min(end, start + left)",
        "end = min(end, start + left + 1)",
    ),
    (
        "a2d_bd3lm",
        "full_attention",
        "rounded_quotas(size, text.steps)[step]",
        "llada_quota(size, text.steps, step)",
    ),
    (
        "llada_vanilla",
        "full_attention",
        "llada_quota(size, text.steps, step)",
        "llada_quota(size, text.steps + 1, step)",
    ),
    (
        "llada_fast_nocache",
        "full_attention",
        "if score >= limit",
        "if score >= limit / 2",
    ),
    (
        "llada_prefix_cache",
        "full_attention",
        "PREFIX_CACHE: (low, end)",
        "PREFIX_CACHE: (low, high)",
    ),
    (
        "llada_dual_cache",
        "full_attention",
        "DUAL_CACHE: (low, high)",
        "DUAL_CACHE: (low, end)",
    ),
    (
        "llada_dual_cache_factor",
        "full_attention",
        "count = factor_count(scores, rules.factor)",
        "count = factor_count(scores, rules.factor / 2)",
    ),
    (
        "dream_maskgit_plus",
        "full_attention",
        "p - first - text.model.shift for",
        "p - first for",
    ),
    (
        "dream_threshold_nocache",
        "full_attention",
        "(step + 1) + min(step + 1,",
        "(step + 2) + min(step + 1,",
    ),
    (
        "dream_dual_cache_entropy",
        "full_attention",
        "left[0] == low and step == 0",
        "left[0] == low and step == 1",
    ),
    (
        "widths",
        "widths",
        "if stop - canvas <= 2 - shift",
        "if stop - canvas < 2 - shift",
    ),
    ("widths", "widths", "stop + shift, limit", "stop, limit"),
    ("widths", "widths", "blocks += [blocks[-1] + 1] *", "blocks += [blocks[-1]] *"),
]


@pytest.mark.parametrize(("trace", "module", "old", "new"), MUTATIONS)
def test_a_changed_constant_is_seen(
    trace: str, module: str, old: str, new: str
) -> None:
    """A loop with the change decodes some case in another way."""
    loops = Loops(module, old, new)
    assert not all(loops.agrees(case) for case in cases_of(trace))
