"""At which sizes steps are captured as CUDA graphs, and which worker captures them.

vLLM captures full graphs of one length per request, the canvas. From `commit_alone_from` requests
on steps are one block each; our worker captures those as well.
"""

from collections.abc import Iterable, Sequence

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

from dllm_plugin.config.decode import DecodeConfig

logger = init_logger("vllm.dllm_plugin")

WORKER = "dllm_plugin.engine.worker.DiffusionWorker"


def capture_sizes(config: DecodeConfig, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Tokens of canvases, up to what a step can hold, and of blocks, where those are fed alone.

    Of many canvases too: piecewise graphs, which prompts take, have the same sizes.
    """
    # The scheduler keeps room for a whole canvas of every running request.
    most = min(max_num_seqs, max_num_tokens // config.canvas_length)
    counts = [n for n in (1, 2, 4) if n < most] + list(range(8, most, 8)) + [most]
    alone = config.commit_alone_from
    sizes = {n * config.canvas_length for n in counts}
    if alone:
        sizes |= {n * config.block_length for n in counts if n >= alone}
    return sorted(sizes)


def canvases_needed(counts: Sequence[int], alone: int) -> int:
    """How many of these ascending numbers of canvases it takes to hold fewer than `alone`."""
    return sum(before < alone - 1 for before in (0, *counts[:-1])) if counts else 0


def block_counts(sizes: Iterable[int], block_length: int, fewest: int, most: int) -> list[int]:
    """How many requests of one block each have a full graph: `fewest` to `most`, ascending.

    As vLLM turns capture sizes (tokens) into numbers of canvases: rounded up, and none above the
    largest size, for which backends have made room.
    """
    sizes = list(sizes)
    counts = {cdiv(size, block_length) for size in sizes}
    room = max(sizes, default=0) // block_length
    return sorted(n for n in counts if fewest <= n <= min(most, room))


def worker_for(config: DecodeConfig, given: str, mode: CUDAGraphMode | None, can: bool) -> str:
    """The `worker_cls`: ours where steps of one block each can have full graphs.

    vLLM settles "auto" and an open mode after this; where it then takes no full graphs, ours adds
    none. A class of the user's own stays. `can`: on a CUDA GPU, and not eager.
    """
    alone, piecewise = config.commit_alone_from, (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)
    if not alone or config.kv_cache_layout == "distinct" or mode in piecewise or not can:
        return given
    if given not in ("auto", WORKER):
        logger.warning(
            "Steps of one block each (commit_alone_from %d) have no full CUDA graphs under "
            "worker_cls %s: derive it from %s to have them.",
            alone,
            given,
            WORKER,
        )
        return given
    return WORKER
