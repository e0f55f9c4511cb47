"""Choose the sizes at which steps are captured as CUDA graphs, and the worker that captures them.

vLLM captures full graphs of one length per request, the canvas. Our worker captures steps of other
uniform lengths: single blocks from `commit_alone_from` requests on, and of full attention the
forwards of one block each, and refreshes that begin near their block by the engine's options.

Compute how much context vLLM's warm-up of GPUs needs.
"""

from collections.abc import Collection, Iterable, Sequence

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv

from dllm_plugin.decoding.full_attention import limit
from dllm_plugin.decoding.widths import allowed, widths_between, widths_worth

from .decode import DecodeConfig
from .memory import is_small_card

logger = init_logger("vllm.dllm_plugin")

WORKER = "dllm_plugin.engine.worker.worker.DiffusionWorker"
# Requests up to which floating canvases have a graph for every eighth number.
FINE = 64
GRAMMAR_WORKER = "dllm_plugin.engine.worker.worker.GrammarWorker"
CPU_WORKER = "dllm_plugin.engine.worker.cpu_worker.DiffusionCPUWorker"
OUR_WORKERS = ("auto", WORKER, GRAMMAR_WORKER, CPU_WORKER)
# Sizes of graphs if steps have any size: vLLM's defaults, and some larger ones. Larger steps take
# the device longer than the host.
ANY_SIZE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(576, 1025, 64))
SMALL_CARD_SIZE = 256  # at most, on a GPU of which vLLM may use little memory
# Most requests in a full graph of refreshes, or of forwards to the end of the canvas: more requests
# are seldom equally far from it.
FEW_REQUESTS = 2
# Of refreshes that have full graphs; each takes time at start and memory.
MOST_LENGTHS = 32


def capture_sizes(
    config: DecodeConfig, max_num_seqs: int, max_num_tokens: int
) -> list[int]:
    """Return the sizes in tokens of whole canvases, and of single blocks if steps compute them.

    Sizes of many canvases are included, since piecewise graphs of prompts use the same sizes.
    """
    if config.method.scheduler != "canvas":
        return [size for size in ANY_SIZE if size <= max_num_tokens]
    # The scheduler keeps room for a whole canvas of every running request.
    most = min(max_num_seqs, max_num_tokens // config.canvas_length)
    counts = _counts(most)
    alone = config.commit_alone_from
    sizes = {n * config.canvas_length for n in counts}
    if alone:
        sizes |= {n * config.block_length for n in counts if n >= alone}
    return sorted(sizes)


def _counts(most: int, fine: int = 0) -> list[int]:
    """Return the numbers of requests to capture; above `fine`, unless 0, every other number."""
    counts = [n for n in (1, 2, 4, *range(8, most, 8)) if n < most]
    if fine:
        counts = [n for n in counts if n <= fine or n % 16 == 0]
    return [*counts, most]


def canvases_needed(counts: Sequence[int], alone: int) -> int:
    """Count the ascending numbers of canvases that steps of fewer than `alone` requests need."""
    if not counts:
        return 0
    return sum(before < alone - 1 for before in (0, *counts[:-1]))


def block_counts(
    sizes: Iterable[int], block_length: int, fewest: int, most: int
) -> list[int]:
    """Return the numbers of requests for which single-block steps have a full graph, ascending.

    Capture sizes (tokens) become numbers of canvases as in vLLM: rounded up, and none above the
    largest size, for which backends reserve buffers.
    """
    sizes = list(sizes)
    counts = {cdiv(size, block_length) for size in sizes}
    room = max(sizes, default=0) // block_length
    return sorted(n for n in counts if fewest <= n <= min(most, room))


def uniform_graphs(
    config: DecodeConfig, sizes: Iterable[int], max_num_seqs: int, max_num_tokens: int
) -> dict[int, list[int]]:
    """Return the full graphs: positions of each request to ascending numbers of requests.

    Graphs of whole canvases are vLLM's own. `sizes`: captured sizes in tokens.
    """
    sizes = list(sizes)
    block = config.block_length
    canvas = config.canvas_length
    if config.method.full_attention:
        return _full_attention_graphs(config, sizes, max_num_seqs, max_num_tokens)
    # The scheduler keeps room for a whole canvas of every running request.
    most = min(max_num_seqs, max_num_tokens // canvas)
    if config.method.floats:
        return _floating_graphs(config, max(sizes, default=0), most)
    if config.draft_rows:
        return _draft_graphs(config, sizes, most)
    canvases = block_counts(sizes, canvas, 1, max_num_seqs)
    alone = config.commit_alone_from
    if not alone:
        return {canvas: canvases}
    # No graphs of more whole canvases than any step computes once steps take single blocks.
    needed = canvases[: canvases_needed(canvases, alone)]
    return {canvas: needed} | {block: block_counts(sizes, block, alone, most)}


def _full_attention_graphs(
    config: DecodeConfig, sizes: list[int], max_num_seqs: int, max_num_tokens: int
) -> dict[int, list[int]]:
    """Return the full graphs of forwards between refreshes, and of refreshes near their block.

    Refreshes of everything differ in length with the prompt, and have piecewise graphs.
    """
    few = min(FEW_REQUESTS, max_num_seqs)
    most = dict.fromkeys(refresh_lengths(config), few)
    if config.method.computes_rest:
        most |= dict.fromkeys(rest_lengths(config), few)
    else:
        most[config.block_length] = max_num_seqs
    graphs = {}
    for length, count in sorted(most.items()):
        fits = min(count, max_num_tokens // length)
        counts = block_counts(sizes, length, 1, fits)
        if counts:
            graphs[length] = counts
    return graphs


def captured_lengths(config: DecodeConfig) -> Collection[int]:
    """Return how many positions of a request full graphs compute, unless canvases float."""
    if config.method.full_attention:
        return rest_lengths(config) | refresh_lengths(config)
    return config.draft_rows or (config.canvas_length, config.block_length)


def rest_lengths(config: DecodeConfig) -> set[int]:
    """Return the lengths of forwards that reach from their block to the end of the canvas."""
    block = config.block_length
    window = limit(config.defaults.suffix_window)
    rests = range(0, config.canvas_length - block + 1, block)
    return {block + min(window, rest) for rest in rests}


def refresh_lengths(config: DecodeConfig) -> set[int]:
    """Return the lengths of refreshes that begin within the answer, by the engine's options.

    Covers answers no longer than the canvas. vLLM treats a refresh that begins in the prompt as a
    prefill, for which it replays no full graph. Empty if every refresh computes everything, or if
    there are too many lengths.
    """
    asked, block = config.defaults, config.block_length
    blocks = config.canvas_length // block
    window = limit(asked.suffix_window)
    lengths = set()
    for number in range(1, blocks):
        answer = number * block  # decided positions before the block
        before = answer if asked.refresh_before is None else asked.refresh_before
        if number % asked.full_refresh_every and before <= answer:
            rests = range(0, (blocks - number) * block, block)
            lengths |= {before + block + min(window, rest) for rest in rests}
    return lengths if len(lengths) <= MOST_LENGTHS else set()


def _floating_graphs(
    config: DecodeConfig, room: int, most: int
) -> dict[int, list[int]]:
    """Return for each width of floating canvases the numbers of requests to capture."""
    widths = widths_between(config.min_window, config.max_window)
    graphs: dict[int, list[int]] = {}
    for count in _counts(most, fine=FINE):
        for width in widths_worth(count, widths, config.family.logits_shift):
            if count * width <= room:
                graphs.setdefault(width, []).append(count)
    return graphs


def _draft_graphs(
    config: DecodeConfig, sizes: list[int], most: int
) -> dict[int, list[int]]:
    """Return for each length of drafts, in rows, the numbers of requests to capture.

    These are numbers among the sizes, since a step of one row has as many positions as requests.
    """
    counts = [n for n in _counts(most, fine=FINE) if n in sizes or n == most]
    graphs = {}
    for rows in config.draft_rows:
        fits = [count for count in counts if count * rows <= max(sizes, default=0)]
        if fits:
            graphs[rows] = fits
    return graphs


def captured_graphs(
    vllm_config: VllmConfig, config: DecodeConfig
) -> dict[int, list[int]]:
    """Return the full graphs that our worker captures, as `uniform_graphs` does."""
    compilation = vllm_config.compilation_config
    scheduler = vllm_config.scheduler_config
    mode = compilation.cudagraph_mode
    sizes = compilation.cudagraph_capture_sizes
    if vllm_config.parallel_config.worker_cls != WORKER or not sizes:
        return {}
    if mode is None or not mode.has_full_cudagraphs():
        return {}
    if not mode.separate_routine():
        return {}
    limits = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return uniform_graphs(config, sizes, *limits)


def allowed_widths(
    vllm_config: VllmConfig, config: DecodeConfig, widths: Sequence[int]
) -> dict[int, tuple[bool, ...]]:
    """Return the widths that load may choose, by numbers of requests; empty: all widths."""
    graphs = captured_graphs(vllm_config, config)
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
    return allowed(graphs, widths, max(sizes))


def worker_for(
    config: DecodeConfig, given: str, mode: CUDAGraphMode | None, can: bool
) -> str:
    """Return the `worker_cls`: ours if steps of other lengths can have full graphs.

    vLLM resolves "auto" and an open mode later; if it then captures no full graphs, our worker
    captures none either. A class of the user's own stays. `can` is the result of `can_capture`.
    """
    alone = config.commit_alone_from
    others = config.method.scheduler != "canvas" or alone > 0
    if "full_graphs" in config.method.refuses or not others or not can:
        return given
    # Not measured there for blocks.
    distinct = config.kv_cache_layout == "distinct" and not config.method.floats
    if distinct or mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        return given
    if given not in ("auto", WORKER):
        logger.warning(
            "%s%s have no full CUDA graphs under worker_cls %s: derive it from %s to have them.",
            "Steps of one width" if config.method.floats else "Steps of one block each",
            f" (commit_alone_from {alone})" if alone else "",
            given,
            WORKER,
        )
        return given
    return WORKER


def set_worker(vllm_config: VllmConfig) -> None:
    """Set a worker that applies grammars in place of vLLM's default worker."""
    if vllm_config.parallel_config.worker_cls == "auto":
        own = CPU_WORKER if current_platform.is_cpu() else GRAMMAR_WORKER
        vllm_config.parallel_config.worker_cls = own


def can_capture(vllm_config: VllmConfig) -> bool:
    """Return whether CUDA graphs are possible: on a CUDA GPU without enforce_eager."""
    return current_platform.is_cuda() and not vllm_config.model_config.enforce_eager


def set_piecewise_graphs(vllm_config: VllmConfig) -> None:
    """Select piecewise graphs only. Raises ValueError if the user asks for full graphs.

    A step of full attention may mix several kinds of forwards. Only our worker captures steps of
    floating canvases, if all have one width.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY):
        raise ValueError(
            f"cudagraph_mode {mode.name} needs full graphs of every step, "
            "which this strategy has not, or not under this worker_cls: use PIECEWISE or NONE."
        )
    if mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE):
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def set_graphs(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Choose which graphs are captured, of what sizes and by which worker."""
    parallel = vllm_config.parallel_config
    method = config.method
    mode = vllm_config.compilation_config.cudagraph_mode
    can = can_capture(vllm_config)
    parallel.worker_cls = worker_for(config, parallel.worker_cls, mode, can)
    # vLLM's graphs of whole canvases serve no other steps.
    without = method.scheduler != "canvas" and parallel.worker_cls != WORKER
    if without or "full_graphs" in method.refuses:
        set_piecewise_graphs(vllm_config)
        if method.full_attention and can:
            set_capture_sizes(vllm_config, config)
    else:
        set_graph_sizes(vllm_config, config)


def set_graph_sizes(vllm_config: VllmConfig, config: DecodeConfig) -> None:
    """Set the sizes of full and piecewise graphs. Raises ValueError for a mode without them."""
    compilation = vllm_config.compilation_config
    scheduler = vllm_config.scheduler_config
    parallel = vllm_config.parallel_config
    if compilation.cudagraph_mode == CUDAGraphMode.FULL:
        raise ValueError(
            "cudagraph_mode FULL would replay prefills with the attention sequences of canvases: "
            "use FULL_AND_PIECEWISE or FULL_DECODE_ONLY."
        )
    alone = config.commit_alone_from
    only_full = compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    if alone and only_full and parallel.worker_cls != WORKER:
        raise ValueError(
            f"commit_alone_from {alone} takes single-block steps, which full CUDA graphs hold "
            "only on CUDA GPUs, with kv_cache_layout 'unified' and no worker_cls of your own: use "
            "cudagraph_mode FULL_AND_PIECEWISE, or leave commit_alone_from out."
        )
    if current_platform.is_cpu() or not set_capture_sizes(vllm_config, config):
        return
    if config.method.floats:
        sizes = compilation.cudagraph_capture_sizes or []
        limits = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        graphs = uniform_graphs(config, sizes, *limits)
        logger.info(
            "Floating canvases have %d full CUDA graphs: of widths %s, for up to %d requests.",
            sum(map(len, graphs.values())),
            ", ".join(map(str, sorted(graphs))),
            max((counts[-1] for counts in graphs.values()), default=0),
        )


def set_capture_sizes(vllm_config: VllmConfig, config: DecodeConfig) -> bool:
    """Set the sizes of graphs unless the user did; return whether they were set."""
    compilation = vllm_config.compilation_config
    scheduler = vllm_config.scheduler_config
    if compilation.cudagraph_capture_sizes is not None:
        return False
    if compilation.max_cudagraph_capture_size is not None:
        return False
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return False
    tokens = scheduler.max_num_batched_tokens
    if config.method.scheduler != "canvas" and is_small_card(vllm_config):
        tokens = min(tokens, SMALL_CARD_SIZE)
    sizes = capture_sizes(config, scheduler.max_num_seqs, tokens)
    compilation.cudagraph_capture_sizes = sizes
    return True


# The warm-up decodes canvases after a prompt that is a position longer, at most 16 tokens (vLLM's
# default of max_tokens), and one position that belongs to no canvas.
LONGER_PROMPT, TOKENS, SINGLE = 1, 16, 1


def warm_up_context(canvas_length: int) -> int:
    """Return the shortest context in which a canvas can be warmed up."""
    return 2 * canvas_length + LONGER_PROMPT + TOKENS + SINGLE
