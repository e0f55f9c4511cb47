"""End requests whose logits are NaN or infinite, and leave nothing of them to others.

Workers count such positions while they read the logits. What the request has proposed is
dropped, so its text ends before anything made up. Its pages leave the prefix cache; pages
of no other request are cleared by the workers before they are used again, since attention
may multiply what lies after a request's keys by zero, and NaN stays NaN.
"""

from collections import Counter

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from dllm_plugin.config.validation import shown
from dllm_plugin.config.worker_carriers import (
    is_unconditional,
    show_broken,
    unpack_broken,
)
from dllm_plugin.engine.platforms import end_with_error

logger = init_logger("vllm.dllm_plugin")

BROKEN = (
    "Request %s ends with an error: the logits of %d positions are NaN or infinite. "
    "Look for a damaged checkpoint or adapter, a dtype too narrow for the model, or "
    "faulty memory."
)


def end_broken(
    scheduler: Scheduler,
    results: ModelRunnerOutput,
    cleared: dict[str, tuple[int, ...]],
) -> dict[str, int]:
    """Have vLLM end requests with broken logits in this step; returns the positions of each.

    Args:
        cleared: gets, by request id, the pages that workers have to clear.
    """
    requests = scheduler.requests
    manager = scheduler.kv_cache_manager
    broken = unpack_broken(results)
    for req_id in broken.keys() - requests.keys():
        del broken[req_id]
    if not broken:
        return broken
    pages: dict[str, list[int]] = {}
    held: Counter[int] = Counter()
    for req_id in broken:
        pages[req_id] = []
        for group in manager.get_block_ids(req_id):
            pages[req_id] += group
        held.update(pages[req_id])
    manager.evict_blocks(set(held))
    blocks = manager.block_pool.blocks
    for req_id, count in broken.items():
        unshared = []
        for page in pages[req_id]:
            # Pages that other requests use were right for them until now.
            if blocks[page].ref_cnt == held[page] and not blocks[page].is_null:
                unshared.append(page)
        cleared[req_id] = tuple(unshared)
        results.sampled_token_ids[results.req_id_to_index[req_id]] = []
        # vLLM's list of requests that end with an error in `update_from_output`.
        end_with_error(scheduler, req_id)
        if not is_unconditional(req_id):
            logger.error(BROKEN, shown(req_id), count)
    return broken


def count_broken(broken: dict[str, int], outputs: dict[int, EngineCoreOutputs]) -> None:
    """Show the counts to vLLM's metrics."""
    if broken:
        for of_client in outputs.values():
            show_broken(of_client.outputs, broken)
