"""Recorded traces of the full-attention reference decoders, in the plugin's own terms."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import FILL, Text

GOLDENS = Path(__file__).parents[1] / "goldens"
CANVAS = 64  # no recorded text is longer
EOS, EOT = 257, 312  # of tiny-llada
FILES = {
    ("llada", "semi_autoregressive"): ("vanilla", "fast_nocache", "stochastic"),
    ("llada", "prefix_cache"): (
        "prefix_cache",
        "prefix_cache_threshold",
        "prefix_cache_factor",
    ),
    ("llada", "dual_cache"): (
        "dual_cache",
        "dual_cache_threshold",
        "dual_cache_factor",
    ),
    ("llada-moe", "semi_autoregressive"): ("vanilla", "fast_nocache"),
    ("llada-moe", "prefix_cache"): ("prefix_cache", "prefix_cache_threshold"),
    ("llada-moe", "dual_cache"): ("dual_cache", "dual_cache_threshold"),
    ("rnd1", "semi_autoregressive"): ("entropy",),
    ("dream", "semi_autoregressive"): (
        "maskgit_plus",
        "entropy",
        "topk_margin",
        "threshold_nocache",
        "origin",
    ),
    ("dream", "prefix_cache"): ("prefix_cache_entropy", "prefix_cache_threshold"),
    ("dream", "dual_cache"): ("dual_cache_entropy", "dual_cache_threshold"),
}
DREAM_POLICIES = {"maskgit_plus": "low_confidence", "confidence_threshold": "threshold"}
SAME_NAME = (
    "eps",
    "top_p",
    "top_k",
    "cfg_scale",
    "logits_eos_inf",
    "confidence_eos_eot_inf",
)


@dataclass(frozen=True)
class Case:
    """One recorded call of a reference, with the settings that ask the plugin for the same."""

    file: str
    strategy: str
    record: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.file} {self.record['id']}"

    @property
    def prompt(self) -> list[int]:
        return self.record["prompt_ids"]

    @property
    def max_tokens(self) -> int:
        settings = self.record["settings"]
        if self.template is not None:
            return self.template.count(FILL)
        if "max_length" in settings:
            return settings["max_length"] - len(self.prompt)
        return settings.get("gen_length") or settings["max_new_tokens"]

    @property
    def template(self) -> list[int] | None:
        """RND1's masks and the text after them; it reserves a last position, too."""
        settings = self.record["settings"]
        if "suffix_ids" not in settings:
            return None
        masks = settings["max_new_tokens"] - len(settings["suffix_ids"]) - 1
        return [FILL] * masks + settings["suffix_ids"]

    @property
    def output(self) -> list[int]:
        """What the engine emits: up to the last mask if a suffix is given."""
        return self.record["output_ids"][: self.max_tokens]

    @property
    def temperature(self) -> float:
        if self.is_rnd1:
            return 0.0  # recorded greedily; the number is that of the entropies
        return self.record["settings"].get("temperature", 0.0)

    @property
    def is_rnd1(self) -> bool:
        return "num_diffusion_steps" in self.record["settings"]

    @property
    def is_served(self) -> bool:
        """Whether no mask token stands in the prompt."""
        return not self.record["id"].startswith("maskprompt")

    @property
    def is_random(self) -> bool:
        """Whether it needs the random numbers that were recorded with it."""
        return "uniform_draws" in self.record or "noise_kind" in self.record

    def numbers(self) -> dict[str, Any]:
        """What the request sets, without ``dllm_``."""
        settings = self.record["settings"]
        if self.is_rnd1:
            return self._numbers_of_rnd1()
        numbers = {name: settings[name] for name in SAME_NAME if name in settings}
        if "block_length" in settings:
            numbers["block_length"] = settings["block_length"]
        blocks = self.max_tokens // settings.get("block_length", self.max_tokens)
        numbers["steps"] = settings["steps"] // blocks
        if "alg" in settings:
            numbers["policy"] = DREAM_POLICIES.get(settings["alg"], settings["alg"])
        else:
            numbers["policy"] = settings.get("remasking", "low_confidence")
        for name in ("threshold", "factor"):
            if name in settings:
                numbers |= {"policy": name, name: settings[name]}
        return numbers

    def _numbers_of_rnd1(self) -> dict[str, Any]:
        settings = self.record["settings"]
        return {
            "policy": "entropy",
            "steps": settings["num_diffusion_steps"],
            "entropy_temperature": settings["temperature"],
        }

    def arguments(self) -> dict[str, Any]:
        """What the request sets, with ``dllm_``."""
        given = {f"dllm_{name}": value for name, value in self.numbers().items()}
        if "add_eos_at_end" in self.record["settings"]:
            given["dllm_add_eos_at_end"] = True
        if self.template is not None:
            given["dllm_template"] = self.template
        return given

    def plain_template(self) -> list[int] | None:
        """The template of the plain loop, with the reserved position of RND1."""
        if not self.is_rnd1:
            return None
        last = self.record["output_ids"][-1:]
        return (self.template or [FILL] * (self.max_tokens - 1)) + last

    def forward_of(self, position: int, step: int) -> int:
        """Index among the forwards of the whole text, of which every block takes as many."""
        numbers = self.numbers()
        block = (position - len(self.prompt)) // numbers.get(
            "block_length", self.max_tokens
        )
        return int(block * numbers["steps"] + step)

    def uniform(self, position: int, step: int) -> float:
        """The number drawn for a masked position in a step of its block."""
        start, index = len(self.prompt), self.forward_of(position, step)
        draws = self.record["uniform_draws"][index]
        if len(draws) == start + self.max_tokens:
            return draws[position]
        # One number for each position that is still masked; of a decided one no number is read.
        done = {p for one in self.record["forwards"][:index] for p, _ in one["new"]}
        if position in done:
            return 0.5
        return draws[position - start - sum(p < position for p in done)]

    def noise(self, position: int, step: int) -> Tensor:
        """The numbers drawn for a row's vocabulary in a step of its block."""
        index = self.forward_of(position, step)
        return logits_of(self.file)[f"{self.record['id']}/uniform_noise_{index}"][
            position
        ]

    def first_logits(self) -> dict[int, Tensor]:
        """Rows of the first forward, by position."""
        rows, name = logits_of(self.file), self.record["id"]
        index = rows[f"{name}/first_logits_rows"].tolist()
        return dict(zip(index, rows[f"{name}/first_logits"], strict=True))

    def decode(self, model: PlainModel) -> Text:
        """The same by the plain loops."""
        rules = Rules(
            self.strategy,
            eos=EOS,
            eot=EOT,
            temperature=self.temperature,
            canvas_length=CANVAS,
            linear=self.is_rnd1,
            **self.numbers(),
        )
        text = Text(model, self.prompt, self.max_tokens, rules)
        text.template = self.plain_template()
        if self.is_random:
            text.uniform, text.noise = self.uniform, self.noise
        decode(text)
        return text


@cache
def logits_of(file: str) -> dict[str, Tensor]:
    return load_file(GOLDENS / f"{file}.logits.safetensors")


@cache
def cases_of(family: str, strategy: str) -> list[Case]:
    """All cases of all files of a strategy."""
    files = [f"{family.replace('-', '_')}_{name}" for name in FILES[family, strategy]]
    cases = [
        Case(file, strategy, record)
        for file in files
        for record in json.loads((GOLDENS / f"{file}.json").read_text())["cases"]
    ]
    return [case for case in cases if case.is_served]
