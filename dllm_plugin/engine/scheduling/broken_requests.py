"""End requests whose logits are NaN or infinite, and leave nothing of them to anybody else.

The read of the logits counts the positions (`num_nans` of the sampler's output). What such a
request has proposed is dropped, so its text ends before anything made up. Its pages leave the
prefix cache; those that nobody shares are cleared by the workers before others take them, since
attention may multiply what lies behind a request's keys by zero, and NaN stays NaN.
"""

from collections import Counter
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from dllm_plugin.config.validation import shown
from dllm_plugin.engine.vllm_versions import end_with_error
from dllm_plugin.sampling.guidance import is_unconditional
from dllm_plugin.state.preempted import BrokenId

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger("vllm.dllm_plugin")


class BrokenRequests:
    """Hold what workers are still to be told: the pages of requests that have ended so."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.scheduler = scheduler
        self._pages: dict[str, tuple[int, ...]] = {}

    def end(self, results: ModelRunnerOutput) -> dict[str, int]:
        """Have vLLM end these requests in this step; returns how many positions each counted."""
        requests, manager = self.scheduler.requests, self.scheduler.kv_cache_manager
        counts = results.num_nans_in_logits or {}
        broken = {i: n for i, n in counts.items() if n > 0 and i in requests}
        if not broken:
            return broken
        pages = {
            i: [p for group in manager.get_block_ids(i) for p in group] for i in broken
        }
        held = Counter(page for own in pages.values() for page in own)
        manager.evict_blocks(set(held))
        blocks = manager.block_pool.blocks
        for request_id, count in broken.items():
            # Pages that others hold too were right for them until now.
            alone = [p for p in pages[request_id] if blocks[p].ref_cnt == held[p]]
            self._pages[request_id] = tuple(p for p in alone if not blocks[p].is_null)
            results.sampled_token_ids[results.req_id_to_index[request_id]] = []
            # vLLM's list of requests that end with an error in `update_from_output`.
            end_with_error(self.scheduler, request_id)
            if not is_unconditional(request_id):
                _log(request_id, count)
        return broken

    def count(
        self, broken: dict[str, int], outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """Tell vLLM's metrics, which read it from a request's output."""
        for of_client in outputs.values() if broken else ():
            for output in of_client.outputs:
                output.num_nans_in_logits = broken.get(output.request_id, 0)

    def mark(self, output: SchedulerOutput) -> None:
        """Tell the workers, with the ids that they are to remove."""
        if self._pages:
            ended = output.finished_req_ids & self._pages.keys()
            output.finished_req_ids -= ended
            output.finished_req_ids |= {BrokenId(i, self._pages.pop(i)) for i in ended}


def _log(request_id: str, count: int) -> None:
    logger.error(
        "Request %s ends with an error: the logits of %d positions are NaN or infinite. Look for a "
        "damaged checkpoint or adapter, a dtype too narrow for the model, or faulty memory.",
        shown(request_id),
        count,
    )
