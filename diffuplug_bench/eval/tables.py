"""Run ``diffuplug eval``: score two ways of decoding, or what its options name."""

import argparse

from diffuplug_bench.eval import every_policy, refreshes, schedules, scores
from dllm_plugin.commands.eval import QUANTISED
from dllm_plugin.commands.offline import engine_options


def run(args: argparse.Namespace) -> int:
    """Score what the options name, which ``diffuplug eval`` has checked."""
    if args.schedule is not None or args.questions is not None:
        widths = schedules.read_widths(args.schedule)
        questions = schedules.read_questions(args.questions, args.limit)
        options = engine_options(args)
        if args.head_quantization is not None:
            dllm = options["additional_config"]["dllm"]
            dllm["head_quantization"] = args.head_quantization
        return schedules.run(options, widths, questions, args.verbose)
    if args.all:
        return every_policy.run(args.limit, args.dtype, args.output, args.verbose)
    if args.refreshes:
        return refreshes.run(args.limit, args.dtype, args.output, args.verbose)
    changed = {}
    for name in QUANTISED:
        if getattr(args, name) is not None:
            changed[name] = getattr(args, name)
    return scores.compare_ways(args.limit, args.dtype, args.verbose, args.json, changed)
