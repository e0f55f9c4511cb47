"""Check the weights of an update, which come to a running model in parts."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dllm_plugin.models.checkpoints.weights import CheckedWeights, Manifest, Weights

# Backends of vLLM's weight transfer that write some parameters themselves, or parts of weights.
PARTIAL_BACKENDS = ("sparse_nccl", "nccl_m2n", "sharded_rdt", "modelexpress")


class WeightUpdate(CheckedWeights):
    """Check the parts of an update, and at its end that nothing is missing.

    `partial`: the backend may leave weights out, and send one several times.
    """

    def __init__(self, manifest: Manifest, partial: bool) -> None:
        super().__init__(replace(manifest, source="update"))
        self.partial = partial

    def part(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights`; raise ValueError at once for one that is wrong or comes again.

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


def check_packing(quantized: bool, on_cpu: bool) -> None:
    """Raise ValueError if vLLM cannot put new weights in place of those that it packed."""
    if quantized and on_cpu:
        raise ValueError(
            "Quantised weights cannot be updated in place on CPUs, where vLLM packs them once, at "
            "load: start the engine again."
        )


def check_updatable(lora_path: str | None, merged: bool) -> None:
    """Raise ValueError if an adapter was merged and updates have only the base's weights."""
    if lora_path and not merged:
        raise ValueError(
            "Weights cannot be updated in place under lora_path: the adapter was merged at load."
        )
