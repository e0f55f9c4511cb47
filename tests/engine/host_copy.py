"""An offloading spec for CPUs: pages are copied within main memory, which vLLM does on GPUs only.

`OffloadingConnector` finds it by `spec_name` and `spec_module_path`.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

STORED: list[int] = []  # pages, by their place in main memory
LOADED: list[int] = []


class HostCopies(OffloadingWorker):
    """Copy pages at once."""

    def __init__(self, pages: list[torch.Tensor], num_copies: int) -> None:
        self.pages = pages
        self.copies = [page.new_full((num_copies, page.shape[1]), 99) for page in pages]
        self.ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages of the KV cache."""
        sources, targets = src_spec.block_ids.tolist(), dst_spec.block_ids.tolist()
        for pages, copies in zip(self.pages, self.copies, strict=True):
            copies[targets] = pages[sources]
        return self.end(job_id, STORED, targets)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages back."""
        sources, targets = src_spec.block_ids.tolist(), dst_spec.block_ids.tolist()
        for pages, copies in zip(self.pages, self.copies, strict=True):
            pages[targets] = copies[sources]
        return self.end(job_id, LOADED, sources)

    def end(self, job_id: int, counted: list[int], places: list[int]) -> bool:
        """Record a transfer that is done."""
        counted += places
        self.ended.append(TransferResult(job_id, True, 1, 1.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every transfer is done."""


class HostCopySpec(CPUOffloadingSpec):
    """vLLM's spec, with copies within main memory."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker, which knows the KV cache's pages."""
        assert self.blocks_per_chunk == 1
        pages = [one.tensor for one in kv_caches.tensors]
        return HostCopies(pages, self.num_chunks)
