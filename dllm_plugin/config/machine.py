"""Resolve options that depend on the machine, and compute the memory that a step takes."""

import dataclasses
from collections.abc import Iterator

from vllm import envs
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv

from .cuda_graphs import WORKER, can_capture
from .decode import DecodeConfig
from .memory import chunk_rows, usable_bytes
from .options import Options

logger = init_logger("vllm.dllm_plugin")

# With this many positions in single blocks, steps are so much shorter than with two blocks each
# that dedicated commit forwards pay (benchmarks/reports/h200_steps.md). Not for short blocks, which
# take few forwards anyway.
ALONE_POSITIONS, SHORTEST_BLOCK = 128, 8


def resolve_for_machine(
    vllm_config: VllmConfig, options: Options, config: DecodeConfig
) -> DecodeConfig:
    """Resolve options by the machine. Raises ValueError for an option without effect there."""
    replace = dataclasses.replace
    if not current_platform.is_cpu():
        columns = vllm_config.model_config.get_vocab_size()
        rows = chunk_rows(columns, usable_bytes(vllm_config))
        config = replace(config, rows_at_once=rows)
    eager = current_platform.is_cpu() or vllm_config.model_config.enforce_eager
    problem = next(uncompiled(config, eager), None)
    if options.compile_step and problem:
        raise ValueError(f"compile_step {problem}: leave compile_step out.")
    if config.method.floats and envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            f"adaptive {config.adaptive!r} chooses widths by load, which VLLM_BATCH_INVARIANT "
            "forbids: leave one of them out."
        )
    whole_rows = next(needs_whole_rows(config, vllm_config), None)
    if options.vocab_parallel and whole_rows:
        raise ValueError(f"vocab_parallel {whole_rows}: leave vocab_parallel out.")
    if options.vocab_parallel is None:
        config = replace(config, vocab_parallel=not whole_rows)
    if config.method.causal_commit and options.commit_alone_from is None:
        # Steps compute one block, never the rest of the canvas.
        config = replace(config, commit_alone_from=1)
    elif options.commit_alone_from is None:
        captures = can_capture(vllm_config)
        reason = next(never_alone(config, vllm_config, captures), None)
        fewest = 0 if reason else fewest_alone(config)
        config = replace(config, commit_alone_from=fewest)
        if config.computes_next_block:
            why = f": {reason}" if reason else ""
            logger.info("commit_alone_from is %d%s.", fewest, why)
    if options.compile_step is None:
        mode = vllm_config.compilation_config.mode
        level = vllm_config.optimization_level
        # What vLLM leaves open here becomes NONE at level 0.
        wanted = mode != CompilationMode.NONE and (mode is not None or level > 0)
        config = replace(config, compile_step=wanted and not problem)
    return config


def needs_whole_rows(config: DecodeConfig, vllm_config: VllmConfig) -> Iterator[str]:
    """Yield why ranks do not propose from their own columns of the logits."""
    apart = "keeps the columns of the LM head apart,"
    if config.method.inserts:
        yield f"{apart} among which {config.family.title} looks for second choices"
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        yield "needs a tensor_parallel_size of at least 2, got 1"
    if vllm_config.lora_config is not None:
        yield f"{apart} which enable_lora gathers"


def uncompiled(config: DecodeConfig, eager: bool) -> Iterator[str]:
    """Yield why a step is not compiled; `eager`: on a CPU, or with enforce_eager."""
    if eager:
        yield "needs a GPU and no enforce_eager"
    if config.dedicated_commit and not config.method.causal:
        # Each of their steps also decides the first token of the next block, which keeps state.
        yield (
            "has no effect if finished blocks commit in a forward of their own, as at "
            "max_active_blocks 1"
        )
    if config.method.inserts:
        yield "has no effect if blocks delete and insert tokens, which keeps state"


def fewest_alone(config: DecodeConfig) -> int:
    """Return the number of running requests from which single-block steps pay."""
    return cdiv(ALONE_POSITIONS, config.block_length)


def never_alone(
    config: DecodeConfig, vllm_config: VllmConfig, can: bool
) -> Iterator[str]:
    """Yield why single-block steps are off by default; `can` is the result of `can_capture`.

    Single-block steps need full CUDA graphs, and piecewise graphs if blocks have several lengths.
    With single-block steps results depend on the number of running requests.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.mode
    graphs = compilation.cudagraph_mode
    # What vLLM leaves open becomes compiled at level 1, and gets both kinds of graphs at 2.
    level_two = vllm_config.optimization_level >= 2
    both = (
        can
        and mode in (None, CompilationMode.VLLM_COMPILE)
        and graphs in (None, CUDAGraphMode.FULL_AND_PIECEWISE)
        and (level_two or None not in (mode, graphs))
        # Otherwise only full graphs exist.
        and compilation.splitting_ops != []
        and compilation.cudagraph_capture_sizes is None
        and compilation.max_cudagraph_capture_size is None
    )
    worker = vllm_config.parallel_config.worker_cls
    most = vllm_config.scheduler_config.max_num_seqs
    if not both:
        yield "it needs full and piecewise CUDA graphs, and their sizes left out"
    if not config.computes_next_block:
        yield "a step computes no block after the one that is denoised"
    if config.block_length < SHORTEST_BLOCK:
        yield f"it was not measured for blocks shorter than {SHORTEST_BLOCK}"
    if config.method.exact_end:
        yield "it was not measured for blocks that end where the text does"
    attention = vllm_config.attention_config
    asked = filter(None, (attention.backend, *attention.backend_per_kind.values()))
    others = {backend.name for backend in asked} - {"FLASH_ATTN", "TRITON_ATTN"}
    if config.kv_cache_layout != "unified" or others:
        yield "it needs kv_cache_layout 'unified' with FLASH_ATTN or TRITON_ATTN"
    if worker not in ("auto", WORKER):
        yield f"it needs another worker_cls than {worker}"
    if vllm_config.model_config.is_moe:
        yield "mixtures of experts may lose by it with few requests"
    if envs.VLLM_BATCH_INVARIANT:
        yield "VLLM_BATCH_INVARIANT is set"
    if fewest_alone(config) > most:
        yield f"it pays from {fewest_alone(config)} requests on, and max_num_seqs is {most}"
