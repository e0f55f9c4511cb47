"""Check an adapter before vLLM loads it for the requests that will choose it."""

from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu_worker import Worker


class AdapterWorker(Worker):
    """Run vLLM's worker with adapters of requests that are checked."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter as vLLM does; raise ValueError if it does not fit the model."""
        model: Any = self.get_model()
        model.check_adapter(lora_request.lora_name, lora_request.lora_path)
        return super().add_lora(lora_request)
