"""End requests whose logits are NaN or infinite, and leave nothing of them to others.

Workers count such positions while they read the logits. What the request has proposed is
dropped, so its text ends before anything made up. Its pages leave the prefix cache; pages
of no other request are cleared by the workers before they are used again, since attention
may multiply what lies after a request's keys by zero, and NaN stays NaN.
"""

from collections import Counter
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from dllm_plugin.config.validation import shown
from dllm_plugin.config.worker_carriers import (
    is_unconditional,
    show_broken,
    unpack_broken,
)
from dllm_plugin.engine.platforms import end_with_error

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.dllm_plugin")

BROKEN = (
    "Request %s ends with an error: the logits of %d positions are NaN or infinite. "
    "Look for a damaged checkpoint or adapter, a dtype too narrow for the model, or "
    "faulty memory."
)


class BrokenRequests:
    """Track requests that end because of broken logits.

    pages  by request id, pages that workers have to clear
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self.scheduler = scheduler
        self.pages: dict[str, tuple[int, ...]] = {}

    def end(self, results: ModelRunnerOutput) -> dict[str, int]:
        """Have vLLM end such requests in this step; returns the positions of each."""
        requests, manager = self.scheduler.requests, self.scheduler.kv_cache_manager
        broken = unpack_broken(results)
        for request_id in broken.keys() - requests.keys():
            del broken[request_id]
        if not broken:
            return broken
        pages: dict[str, list[int]] = {}
        for request_id in broken:
            groups = manager.get_block_ids(request_id)
            pages[request_id] = [page for group in groups for page in group]
        held = Counter(page for own in pages.values() for page in own)
        manager.evict_blocks(set(held))
        blocks = manager.block_pool.blocks
        for request_id, count in broken.items():
            unshared = []
            for page in pages[request_id]:
                # Pages that other requests use were right for them until now.
                if blocks[page].ref_cnt == held[page] and not blocks[page].is_null:
                    unshared.append(page)
            self.pages[request_id] = tuple(unshared)
            results.sampled_token_ids[results.req_id_to_index[request_id]] = []
            # vLLM's list of requests that end with an error in `update_from_output`.
            end_with_error(self.scheduler, request_id)
            if not is_unconditional(request_id):
                logger.error(BROKEN, shown(request_id), count)
        return broken

    def count(
        self, broken: dict[str, int], outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Show the counts to vLLM's metrics."""
        if broken:
            for of_client in outputs.values():
                show_broken(of_client.outputs, broken)
