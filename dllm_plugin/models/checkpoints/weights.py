"""Check that a checkpoint has exactly the tensors that a model needs, each with its shape.

vLLM's own loader accepts a missing linear weight, a packed weight with one matrix missing, and
surplus biases. A model loaded like that generates nonsense. So we check the checkpoint's names and
full shapes, before renaming, packing and sharding, in the same way on every rank.

The weights of an update come to a running model in parts, and are checked likewise.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor
from vllm.config import VllmConfig
from vllm.transformers_utils.config import get_safetensors_params_metadata

from . import layouts
from .unserved import check_readable

Weights = Iterable[tuple[str, Tensor]]
Shapes = dict[str, tuple[int, ...]]

# Buffers in old checkpoints that vLLM computes itself.
IGNORED = (".rotary_emb.", "rotary_pos_emb.inv_freq")


@dataclass(frozen=True)
class Manifest:
    """List the tensors that a checkpoint must or may have."""

    shapes: Shapes  # every needed tensor and its full shape
    optional: frozenset[str] = frozenset()  # may be absent
    # Of tensors that are stored quantised.
    packing: layouts.Packing | None = None
    source: str = "checkpoint"  # what errors call the source of the tensors

    def allowed(self, name: str, tensor: Tensor) -> set[tuple[int, ...]] | None:
        """Return the shapes that a tensor may have; None if any will do, or it is surplus."""
        plain = self.shapes.get(name)
        if plain is not None and (self.packing is None or is_plain(tensor)):
            return {plain}
        matrix = self.shapes.get(f"{module_of(name)}.weight", ())
        if self.packing is None or len(matrix) != 2:
            return None
        suffix = name.rpartition(".")[2]
        return layouts.shapes_of(self.packing, suffix, tensor.dtype, matrix)


def module_of(name: str) -> str:
    """Return the module of a weight: `a.b.weight` -> `a.b`."""
    return name.rpartition(".")[0]


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is stored unquantised (float32, bfloat16, float16)."""
    return tensor.is_floating_point() and tensor.element_size() >= 2


def check_tensor(name: str, tensor: Tensor, manifest: Manifest) -> None:
    """Raise ValueError if the model does not have this tensor or needs another shape."""
    if name not in manifest.shapes and manifest.packing is None:
        if name in manifest.optional:
            return
        raise ValueError(
            f"The {manifest.source} holds a weight '{name}' that this model does not have."
        )
    found = tuple(tensor.shape)
    allowed = manifest.allowed(name, tensor)
    if allowed is not None and found not in allowed:
        wanted = " or ".join(map(str, sorted(allowed)))
        raise ValueError(
            f"Weight '{name}' in the {manifest.source} has shape {found}, "
            f"but config.json asks for {wanted}."
        )


class CheckedWeights:
    """Check full tensors under checkpoint names, which come at once or in parts."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.seen: set[str] = set()
        # Tensors of modules that are stored quantised: module -> name in it -> dtype.
        self.stored: dict[str, dict[str, torch.dtype]] = {}

    def part(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`; raise ValueError at once for a surplus or mis-shaped weight."""
        for name, tensor in weights:
            if any(text in name for text in IGNORED):
                continue
            check_tensor(name, tensor, self.manifest)
            self.seen.add(name)
            module, _, suffix = name.rpartition(".")
            plain = suffix in ("weight", "bias") and is_plain(tensor)
            if self.manifest.packing is not None and not plain:
                self.stored.setdefault(module, {})[suffix] = tensor.dtype
            yield name, tensor

    def finish(self) -> None:
        """Raise ValueError for a missing weight or a missing tensor of a quantised weight."""
        missing = []
        for name in self.manifest.shapes:
            module, _, suffix = name.rpartition(".")
            stored = suffix == "weight" and module in self.stored
            present = name in self.seen or stored
            if not present and name not in self.manifest.optional:
                missing.append(name)
        source = self.manifest.source
        if missing:
            others = ""
            if len(missing) > 1:
                others = f" (and {len(missing) - 1} more)"
            raise ValueError(f"The {source} has no weight '{missing[0]}'{others}.")
        for module, tensors in self.stored.items():
            self._check_stored(module, tensors)

    def _check_stored(self, module: str, tensors: dict[str, torch.dtype]) -> None:
        """Raise ValueError if a quantised module lacks a tensor."""
        packing = self.manifest.packing
        weight = f"{module}.weight"
        matrix = self.manifest.shapes.get(weight, ())
        # A module with its plain weight may have scales for keys and values beside it.
        plain = weight in self.seen and "weight" not in tensors
        if packing is None or len(matrix) != 2 or plain:
            return
        suffix = layouts.missing_of(packing, tensors)
        if suffix is None:
            return
        source = self.manifest.source
        if "weight" in tensors and suffix in layouts.SCALES:
            raise ValueError(
                f"The {source} has no scale for quantised weight '{module}'."
            )
        raise ValueError(f"The {source} has no weight '{module}.{suffix}'.")


def checked(weights: Weights, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield a whole checkpoint; raise ValueError for a surplus, mis-shaped or missing weight."""
    whole = CheckedWeights(manifest)
    yield from whole.part(weights)
    whole.finish()


def checkpoint_folder(
    model: str, revision: str | None, cache: str | None
) -> Path | None:
    """Return the checkpoint's folder on this machine, without network access; None if unknown."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=cache, local_files_only=True
            )
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def folder_of(vllm_config: VllmConfig) -> Path | None:
    """Return as :func:`checkpoint_folder`, of the checkpoint that an engine serves."""
    model_config = vllm_config.model_config
    cache = vllm_config.load_config.download_dir
    return checkpoint_folder(model_config.model, model_config.revision, cache)


def count_parameters(model: str, revision: str | None) -> int | None:
    """Return the number of parameters of a checkpoint; None if shapes are unknown."""
    entries = get_safetensors_params_metadata(model, revision=revision).values()
    # A file's own remarks are an entry too, without a shape.
    shapes = [entry["shape"] for entry in entries if "shape" in entry]
    return sum(math.prod(shape) for shape in shapes) if shapes else None


def check_checkpoint(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a damaged checkpoint, before any process is started."""
    folder = folder_of(vllm_config)
    if folder is not None and vllm_config.load_config.load_format != "dummy":
        check_readable(folder)


def readable(weights: Weights, folder: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`; raise ValueError with the name of a damaged file in `folder`."""
    try:
        yield from weights
    except SafetensorError as error:
        if folder is not None:
            check_readable(folder)
        raise ValueError(
            f"Cannot read the checkpoint's safetensors files ({error})."
        ) from error


# Backends of vLLM's weight transfer that write some parameters themselves, or parts of weights.
PARTIAL_BACKENDS = ("sparse_nccl", "nccl_m2n", "sharded_rdt", "modelexpress")


class WeightUpdate(CheckedWeights):
    """Check the parts of an update, and at its end that nothing is missing.

    `partial`: the backend may leave weights out, and send a weight several times.
    """

    def __init__(self, manifest: Manifest, partial: bool) -> None:
        super().__init__(replace(manifest, source="update"))
        self.partial = partial

    def part(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`; raise ValueError at once for a weight that is wrong or comes again.

        vLLM counts the numbers of a packed layer as they come: with one of its weights twice, it
        would take the layer for complete without another.
        """
        for name, tensor in weights:
            if name in self.seen and not self.partial:
                raise ValueError(f"Weight '{name}' comes twice in one update.")
            yield from super().part([(name, tensor)])

    def finish(self) -> None:
        """Raise ValueError for a missing weight; an update without any changes nothing."""
        if self.seen and not self.partial:
            super().finish()


def check_updatable(lora_path: str | None, merged: bool) -> None:
    """Raise ValueError if an adapter was merged and updates have only the base's weights."""
    if lora_path and not merged:
        raise ValueError(
            "Weights cannot be updated in place under lora_path: the adapter was merged at load."
        )
