"""Check that the settings of a measurement fit together. Light imports only."""

from diffuplug_bench.model_shapes import W4A16
from diffuplug_bench.settings import BASELINES, WATCHED, Settings, refreshes_of
from diffuplug_bench.step import schedule
from dllm_plugin.commands.options import flag_of
from dllm_plugin.config.options import Options


def check(settings: Settings, input_len: int | None) -> None:
    """Raise ValueError with one sentence for settings that do not fit together."""
    _check_numbers(settings)
    _check_combinations(settings, input_len)
    for canvas in settings.canvas:
        for variant in settings.variants:
            Options.from_user(settings.dllm(canvas) | refreshes_of(variant))


def _check_numbers(settings: Settings) -> None:
    for name in ("requests", "canvas"):
        if (least := min(getattr(settings, name))) < 1:
            raise ValueError(
                f"--{name} must be whole numbers of at least 1, got {least}."
            )
    names = ["tensor_parallel_size", "pipeline_parallel_size"]
    if settings.measures_steps:
        names.append("context")
    if settings.request_modes:
        names += ["input_len", "output_len", "rounds"]
    for name in names:
        if (value := getattr(settings, name)) < 1:
            raise ValueError(f"{flag_of(name)} must be at least 1, got {value}.")
    unknown = [name for name in settings.versus if name not in BASELINES]
    if unknown:
        raise ValueError(
            f"--vs {unknown[0]} is unknown; baselines: {', '.join(BASELINES)}."
        )
    for canvas in settings.canvas:
        if not settings.grid_requests(canvas):
            raise ValueError(
                f"--max-positions {settings.max_positions} leaves nothing of canvas {canvas} to "
                "measure: raise it."
            )
        block = settings.block(canvas)
        if block < 1 or canvas % block:
            raise ValueError(
                f"--canvas {canvas} is no whole number of blocks of {block}."
            )


def _check_combinations(settings: Settings, input_len: int | None) -> None:
    if settings.mode == "step" and settings.threshold is not None:
        raise ValueError(
            "--threshold changes nothing in the mode step, whose schedule is fixed: use the mode "
            "latency, throughput or all."
        )
    if settings.shapes is not None:
        _check_dummy(settings)
    else:
        _check_checkpoint(settings, input_len)
    _check_full_attention(settings)
    single_block_from = settings.commit_alone_from
    several_blocks = all(map(settings.computes_next_block, settings.canvas))
    if single_block_from and not several_blocks:
        raise ValueError(
            f"--commit-alone-from {single_block_from} needs the strategy block_diffusion and "
            "canvases of more than one block: leave it out."
        )
    if settings.compilation_config is not None and settings.enforce_eager:
        raise ValueError(
            "--compilation-config says how to compile, and --enforce-eager not to: leave one of "
            "them out."
        )
    if settings.mode == "step" and "hf" in settings.versus:
        raise ValueError(
            "--vs hf serves whole requests: use the mode latency, throughput or all."
        )


def _check_dummy(settings: Settings) -> None:
    """Raise ValueError for what dummy weights cannot be asked."""
    rate = settings.tokens_per_forward
    if settings.threshold is not None or settings.lora_path is not None:
        raise ValueError(
            "--threshold and --lora-path mean nothing on dummy weights, whose confidences are "
            "noise: use --tokens-per-forward, or --model."
        )
    if settings.request_modes and settings.measured.by_confidence:
        raise ValueError(
            "--strategy d2f accepts by confidence, which dummy weights do not have: use "
            "block_diffusion with --tokens-per-forward, or --model."
        )
    if settings.request_modes and rate is None:
        raise ValueError(
            "--shapes needs --tokens-per-forward: dummy weights accept nothing."
        )
    if rate is not None:
        smallest = min(map(settings.block, settings.canvas))
        if not 1 <= rate <= smallest:
            raise ValueError(
                f"--tokens-per-forward {rate:g} must lie between 1 and a block of {smallest}."
            )
        points = []
        for canvas in settings.canvas:
            points.append((settings.block(canvas), settings.served_requests(canvas)))
        schedule.check(rate, settings.output_len, settings.rounds, points)
    if settings.mode == WATCHED:
        _check_watched(settings)


def _check_checkpoint(settings: Settings, input_len: int | None) -> None:
    """Raise ValueError for options of dummy weights."""
    if settings.quantization == W4A16:
        raise ValueError(
            f"--quantization {W4A16} is a form of dummy weights: use --shapes, or take --model "
            "that is stored in it."
        )
    if settings.tokens_per_forward is not None:
        raise ValueError(
            "--tokens-per-forward is measured on a checkpoint: use --shapes."
        )
    if input_len is not None:
        raise ValueError(
            "--input-len is what the prompts have on a checkpoint: use --shapes."
        )
    if settings.model is not None and "hf" in settings.versus:
        raise ValueError(
            "--vs hf needs --shapes, or the bundled model: leave --model out."
        )


def _check_full_attention(settings: Settings) -> None:
    """Raise ValueError for what only some strategies with full attention can have."""
    asked: set[str] = set()
    for variant in settings.approximations:
        asked.update(refreshes_of(variant))
    if asked - {"suffix_window"} and not settings.measured.refreshes:
        raise ValueError(
            f"--approximations of {settings.strategy} can have a suffix_window alone, as in ::32."
        )
    if settings.approximations and not settings.measured.full_attention:
        raise ValueError(
            f"--approximations are of full attention, not of --strategy {settings.strategy}."
        )
    if (
        settings.profile
        and settings.measured.full_attention
        and not settings.measured.refreshes
    ):
        raise ValueError(
            f"--profile needs forwards in full CUDA graphs, and those of --strategy "
            f"{settings.strategy} have piecewise ones: leave --profile out."
        )


def _check_watched(settings: Settings) -> None:
    """Raise ValueError unless steps can be counted in a stream, whose text comes by block."""
    most = max(settings.requests)
    if settings.watched[0] < 0 or settings.watched[-1] > most:
        raise ValueError(
            f"--watched must be numbers from 0 to --requests, which is {most}, got "
            f"{','.join(map(str, settings.watched))}."
        )
    for canvas in settings.canvas:
        block = settings.block(canvas)
        if settings.output_len % block or settings.output_len < 4 * block:
            raise ValueError(
                f"--output-len {settings.output_len} is not at least four whole blocks of {block}: "
                f"use {max(4, -(-settings.output_len // block)) * block}."
            )
        if (steps := settings.steps_of_block(canvas)) % 1:
            raise ValueError(
                f"--tokens-per-forward {settings.tokens_per_forward:g} takes no whole number of "
                f"steps for a block of {block}: use {block / round(steps):g}."
            )
