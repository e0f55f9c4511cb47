"""Run ``diffuplug generate``: answer one prompt with an engine in this process."""

import argparse
import sys
import time

from dllm_plugin.commands.offline import (
    collecting_later,
    engine_options,
    num_forwards,
    start_engine,
    stop_engine,
    stream_answer,
)


def run(args: argparse.Namespace) -> int:
    """Print the answer on standard output while it forms, everything else on standard error."""
    options = engine_options(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    from dllm_plugin.commands.phases import screen

    with screen(args.verbose) as shown:
        with collecting_later():
            from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
        )
        llm = start_engine(options, shown.log)
        shown.end("ready")
        start = time.perf_counter()
        tokens = forwards = 0
        for output in stream_answer(llm, prompt, args.chat, sampling):
            piece = output.outputs[0]
            shown.out.write(piece.text)
            shown.out.flush()
            tokens += len(piece.token_ids)
            if output.finished:
                forwards = num_forwards(output)
        shown.out.write("\n")
        shown.out.flush()
        shown.note(summary(tokens, forwards, time.perf_counter() - start))
        stop_engine(llm)
    return 0


def summary(tokens: int, forwards: int, seconds: float) -> str:
    """Say what an answer cost."""
    per_forward = tokens / max(forwards, 1)
    return (
        f"{tokens} tokens, {forwards} forwards, {per_forward:.2f} tokens per forward, "
        f"{seconds:.2f} seconds"
    )
