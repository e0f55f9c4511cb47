"""Each plain loop can fail: with one constant changed it misses the recorded decodes."""

import json
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_decodes import (
    EXACT,
    FULL,
    GOLDENS,
    NEMOTRON,
    ON_GRID,
    ROUNDED,
    WINDOWS,
    Case,
    d2f,
    decides_as_recorded,
    exact,
    full_attention,
    introspective,
    model_of,
    nemotron,
    on_grid,
    rounded,
    structure,
    window,
)

from dllm_plugin import reference
from dllm_plugin.reference.loops import LOOPS
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules

PACKAGE = "dllm_plugin.reference"
MODULES = (
    *("proposing", "full_attention", "blocks", "widths", "causal_blocks"),
    "structure",
)
PROMPT, COUNT = [30 + 7 * i % 90 for i in range(25)], 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The GEMMs are tiny: several threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    readers |= dict.fromkeys(WINDOWS, window) | {"idlm_greedy": introspective}
    readers |= dict.fromkeys(NEMOTRON, nemotron)
    readers |= {"llada22_levenshtein": structure}
    read = readers.get(trace, d2f)
    records = json.loads((GOLDENS / f"{trace}.json").read_text())["cases"]
    if trace in FULL:
        apart = {"remasking", "temperature", "cfg_scale"}
        records = [r for r in records if not apart & set(r["settings"])]
    if trace in EXACT:
        # An answer that a stop token cuts does not tell where blocks end.
        records = [r for r in records if "eos_id" not in r["settings"]]
    if trace == "nemotron_linear_spec":
        # Neither with an adapter, nor with a token that only our loop emits.
        records = [r for r in records if not r["settings"]["lora"]]
        records = [r for r in records if "think" not in r["id"]]
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
        module.__package__ = PACKAGE
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
        length = case.max_tokens or len(case.answer)
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
        if case.rules.strategy in NEMOTRON.values():
            return decides_as_recorded(text, case)
        if case.rules.strategy == "introspective":
            return emits(case, text)
        names = ("q_start", "q_len", "kv_len", "new")
        wanted = [tuple(one[name] for name in names) for one in case.forwards]
        return [(f.start, f.length, f.keys, f.new) for f in text.forwards] == wanted


def emits(case: Case, text: Any) -> bool:
    """Whether each forward decides all that the authors' forward emits."""
    assert case.forwards is not None
    if len(text.forwards) != len(case.forwards):
        return False
    for ours, one in zip(text.forwards, case.forwards, strict=True):
        if (ours.start, ours.length) != (one["q_start"], one["q_len"]):
            return False
        if [pair for pair in one["new"] if pair in ours.new] != one["new"]:
            return False
    return True


CAUSAL = ("idlm_greedy", *WINDOWS, *NEMOTRON, "llada22_levenshtein")
TRACES = ("d2f_llada", "d2f_dream", *ON_GRID, *EXACT, *ROUNDED, *FULL, *CAUSAL)
TRACES = (*TRACES, "widths")


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
        "blocks",
        "step = 0 if len(written) == len(rows) else step + 1",
        "step = step + 9",
    ),
    ("fast_dllm", "blocks", "text.predict()[-1:]", "text.predict()[-2:-1]"),
    (
        "stable_diffcoder_quota",
        "blocks",
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
        "numbers.rounded_quota(len(left), text.steps, step)",
        "numbers.llada_quota(size, text.steps, step)",
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
        "factor_count(scores, factor)",
        "factor_count(scores, factor / 2)",
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
    ("idlm_greedy", "causal_blocks", "start + text.block_length if", "start if"),
    ("idlm_greedy", "causal_blocks", "!= draft", "== draft"),
    ("wedlm_window", "causal_blocks", "decided + masks", "masks + decided"),
    ("wedlm_window", "causal_blocks", "rules.position_penalty", "0.5"),
    (
        "nemotron_generate",
        "causal_blocks",
        "partial(_proposals, text, start))",
        "partial(_proposals, text, start - 1))",
    ),
    ("nemotron_generate", "causal_blocks", "if end <= place or", "if end < place or"),
    (
        "nemotron_linear_spec",
        "causal_blocks",
        "draft != rows[place].token",
        "draft != rows[place + 1].token",
    ),
    (
        "llada22_levenshtein",
        "structure",
        "block.post >= text",
        "block.post > text",
    ),
    ("llada22_levenshtein", "structure", "append(old[i], was", "append(delete, was"),
    ("widths", "widths", "blocks += [blocks[-1] + 1] *", "blocks += [blocks[-1]] *"),
]


@pytest.mark.parametrize(("trace", "module", "old", "new"), MUTATIONS)
def test_a_changed_constant_is_seen(
    trace: str, module: str, old: str, new: str
) -> None:
    """A loop with the change decodes some case in another way."""
    loops = Loops(module, old, new)
    assert not all(loops.agrees(case) for case in cases_of(trace))


def test_every_loop_is_changed() -> None:
    changed = {cases_of(trace)[0].rules.strategy for trace, *_ in MUTATIONS}
    assert changed == {*LOOPS}
