"""Update the weights of a running model in parts, and undo an update that fails.

During an update vLLM keeps the old tensors of each layer aside, and writes new values into them
once all weights of the layer have come. vLLM does not end a failed update: the next forward would
find layers without tensors and end the engine.

Adapters of requests are checked before vLLM loads them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
)

from dllm_plugin.config.scheduling import IN_PLACE

from .ranks import Agreement, RankWorker, fail_together


class UpdatingWorker(RankWorker):
    """Run vLLM's worker with checked updates of weights, and checked adapters of requests."""

    @fail_together
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter as vLLM does; raise ValueError if it does not fit the model."""
        if lora_request.load_inplace:
            raise ValueError(IN_PLACE)
        model: Any = self.get_model()
        with Agreement():
            model.check_adapter(lora_request.lora_name, lora_request.lora_path)
        return super().add_lora(lora_request)

    @fail_together
    def start_weight_update(self) -> None:
        """Start an update as vLLM does; raise ValueError if the weights cannot be updated."""
        model: Any = self.get_model()
        transfer = self.vllm_config.weight_transfer_config
        with Agreement():
            update = model.new_update(transfer.backend if transfer else "")
        super().start_weight_update()
        model.update = update
        self._open_layers(model)

    @fail_together
    def update_weights(
        self, update_info: dict[str, Any] | list[dict[str, Any]]
    ) -> None:
        """Load a part as vLLM does; a wrong part ends the update."""
        with ExitStack() as stack:
            # vLLM ends the update only on the rank that fails.
            stack.callback(setattr, self, "_weight_update_active", False)
            with self._closed_by_errors():
                super().update_weights(update_info)
            stack.pop_all()

    @fail_together
    def finish_weight_update(self) -> None:
        """Finish an update as vLLM does; raise ValueError if a weight has not come."""
        model: Any = self.get_model()
        try:
            with self._closed_by_errors():
                if model.update is not None:
                    model.update.finish()
        finally:
            with self._closed_by_errors():
                super().finish_weight_update()
        model.update = None
        self._close_layers(model)

    @fail_together
    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load a whole checkpoint as vLLM does; keep the old weights if loading fails."""
        model: Any = self.get_model()
        with Agreement():
            if model.update is not None:
                raise RuntimeError(
                    "reload_weights within a weight update: finish the update first."
                )
            model.check_packing()
            self._open_layers(model)
        with self._closed_by_errors():
            super().reload_weights(*args, **kwargs)
        self._close_layers(model)

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """End the update, on all ranks, if it fails on one."""
        with ExitStack() as stack:
            stack.callback(self._close_update)
            with Agreement():
                yield
            stack.pop_all()

    def _close_update(self) -> None:
        """Restore the old tensors of layers that were not updated."""
        model: Any = self.get_model()
        model.update = None
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            # Of a layer for which nothing has come, vLLM keeps the old tensors.
            info.load_numel = 0
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
        self._close_layers(model)

    def _open_layers(self, model: nn.Module) -> None:
        """Prepare layers for new weights beyond what vLLM does."""

    def _close_layers(self, model: nn.Module) -> None:
        """Undo `_open_layers` after new weights have come or not."""
