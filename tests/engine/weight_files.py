"""Weights from safetensors files, by vLLM's own transfer lifecycle.

The backends that vLLM brings move tensors between GPUs. `--worker-extension-cls
weight_files.FromFiles` makes every worker import this, which registers one for CPUs.
"""

from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "files"


class FromFiles:
    """What the worker class is extended by: nothing."""


@dataclass
class Nothing(WeightTransferInitInfo):
    """Nothing is agreed on."""


@dataclass
class Part(WeightTransferUpdateInfo):
    """A file and the weights to take of it; none: all."""

    file: str
    names: list[str] = field(default_factory=list)


class FileTransfer(WeightTransferEngine[Nothing, Part]):
    """The calls that vLLM's backends for NCCL and CUDA IPC make, with files in between."""

    init_info_cls = Nothing
    update_info_cls = Part

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """There is nobody to meet."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: Part) -> None:
        tensors = load_file(update_info.file)
        names = update_info.names or list(tensors)
        model: Any = self.model
        model.load_weights([(name, tensors[name]) for name in names])

    def shutdown(self) -> None:
        """No connection is open."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
