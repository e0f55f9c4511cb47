"""List public checkpoints: short names, sizes and the pages with their settings.

Rows are in `catalogue.csv`; numbers come from the checkpoints' ``config.json``, and `docs/models/`
names the sources.
"""

import csv
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm_plugin.config.validation import did_you_mean

from .checkpoints.sizes import EIGHT_BITS, FOUR_BITS, NAMES, Sizes, count_sizes

PAGES = "docs/models/"
PRECISIONS = ("bf16", "FP8", "INT4")
LONG = 8192  # tokens of a request that must have room beside the weights
OTHER = 1.5  # GB of logits and graphs


@dataclass(frozen=True)
class Checkpoint:
    """Describe a public checkpoint.

    Attributes:
        hub: name on the Hugging Face hub.
        architecture: the first name in its ``architectures``.
        shape: keys of its ``config.json`` that its sizes follow from.
        context: positions that its authors state.
        decoding: strategy and policy by default.
        page: file in docs/models with the authors' settings and scores.
    """

    hub: str
    architecture: str
    shape: dict[str, Any]
    context: int
    decoding: str
    page: str

    @cached_property
    def sizes(self) -> Sizes:
        """The numbers of its weights, and of its keys and values."""
        return count_sizes(self.shape)

    def gigabytes(self) -> tuple[float, float, float]:
        """Return the size of the weights in bf16, FP8 and INT4, in GB."""
        found = []
        for layer_bytes in (2, EIGHT_BITS, FOUR_BITS):
            found.append(self.sizes.weight_bytes(layer_bytes) / 1e9)
        return found[0], found[1], found[2]

    def kv_gigabytes(self) -> float:
        """Return the keys and values of 1,000 tokens in bf16, in GB."""
        return 1000 * 2 * self.sizes.kv_values / 1e9

    def fits(self, memory: float, gpu: bool = True) -> str:
        """Return the largest precision that some GB have room for, with one request."""
        request = min(self.context, LONG) / 1000 * self.kv_gigabytes()
        for name, weights in zip(PRECISIONS, self.gigabytes(), strict=True):
            if name != PRECISIONS[0] and not gpu and self.shape.get("num_experts"):
                break  # most CPUs have no kernels of quantised experts
            if weights + request + OTHER <= memory:
                return name
        return "no"


# Columns of `catalogue.csv` that are keys of a ``config.json``; an empty one is absent there.
COLUMNS = (
    *NAMES,
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_shared_experts",
    "first_k_dense_replace",
)


def read_checkpoints(path: Path) -> dict[str, Checkpoint]:
    """Read the rows of a catalogue: short name to checkpoint."""
    checkpoints = {}
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        checkpoints[row["name"]] = Checkpoint(
            row["hub"],
            row["architecture"],
            {name: json.loads(row[name]) for name in COLUMNS if row[name]},
            int(row["context"]),
            row["decoding"],
            row["page"],
        )
    return checkpoints


CHECKPOINTS = read_checkpoints(Path(__file__).with_name("catalogue.csv"))


def hub_name(model: str) -> str:
    """Return the hub name of a short name, and any other name as it is.

    Raises ValueError for what is written like a short name, or begins one, and is not listed.
    """
    if model in CHECKPOINTS:
        return CHECKPOINTS[model].hub
    begins = any(name.startswith(f"{model.lower()}:") for name in CHECKPOINTS)
    if begins or (":" in model and "/" not in model):
        raise ValueError(
            f"{model} is no short name (`diffuplug models` lists them)"
            + did_you_mean(model.lower(), CHECKPOINTS)
        )
    return model
