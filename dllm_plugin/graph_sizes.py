"""When steps are one block each, and at which sizes steps are captured as CUDA graphs, by whom.

vLLM captures full graphs of one length per request, the canvas. From `commit_alone_from` requests
on steps are one block each; our worker captures those as well.
"""

from collections.abc import Iterable, Sequence

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

from dllm_plugin.config import DecodeConfig

logger = init_logger("vllm.dllm_plugin")

WORKER = "dllm_plugin.worker.DiffusionWorker"
# From so many positions of single blocks on, a step takes so much less time than one of two blocks
# each that this pays for the passes that only commit (benchmarks/reports/h200_steps.md); of short
# blocks, which take few passes, twice as many.
ALONE_POSITIONS, SHORT_BLOCK = 128, 8


def alone_from(config: DecodeConfig, vllm_config: VllmConfig, can: bool) -> int:
    """From how many running requests on a step feeds one block each, where nobody said; 0: never.

    Only where steps have full CUDA graphs, and results may depend on how many run. Mixtures of
    experts were not measured. `can`: on a CUDA GPU, and not eager.
    """
    assert config.block_length is not None
    positions = ALONE_POSITIONS * (2 if config.block_length < SHORT_BLOCK else 1)
    fewest, most = cdiv(positions, config.block_length), vllm_config.scheduler_config.max_num_seqs
    level, mode = vllm_config.optimization_level, vllm_config.compilation_config.cudagraph_mode
    # What vLLM leaves open here becomes FULL_AND_PIECEWISE at level 2.
    full = level >= 2 if mode is None else mode.has_full_cudagraphs()
    model_config, given = vllm_config.model_config, vllm_config.parallel_config.worker_cls
    able = can and full and given in ("auto", WORKER)
    able = able and config.feeds_ahead and config.kv_cache_layout == "unified"
    measured = not model_config.is_moe and not envs.VLLM_BATCH_INVARIANT
    return fewest if able and measured and fewest <= most else 0


def capture_sizes(config: DecodeConfig, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Tokens of canvases, up to what a step can hold; or of blocks, where those are fed alone."""
    assert config.canvas_length is not None and config.block_length is not None
    alone = config.commit_alone_from

    def counts_of(length: int) -> list[int]:
        most = min(max_num_seqs, max_num_tokens // length)
        return [n for n in (1, 2, 4) if n < most] + list(range(8, most, 8)) + [most]

    canvases, blocks = counts_of(config.canvas_length), []
    if alone:
        canvases = canvases[: needed(canvases, alone)]
        blocks = [n for n in counts_of(config.block_length) if n >= alone]
    sizes = {n * config.canvas_length for n in canvases} | {n * config.block_length for n in blocks}
    return sorted(sizes)


def needed(counts: Sequence[int], alone: int) -> int:
    """How many of these ascending numbers of canvases have room for fewer than `alone`."""
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
