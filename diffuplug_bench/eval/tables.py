"""Parse the command line of ``diffuplug eval``, and score what it names."""

import argparse
from collections.abc import Sequence

from diffuplug_bench.eval.report import reports_folder
from dllm_plugin.commands.models import resolve
from dllm_plugin.commands.offline import engine_options, spin_briefly
from dllm_plugin.commands.options import (
    DECODE_OPTIONS,
    MODEL,
    Parser,
    add_count,
    add_dtype,
    add_flags,
    add_memory_share,
    add_switch,
    add_value,
    add_verbose,
    flag_of,
    given,
)

QUANTISED = ("quantization", "kv_cache_dtype", "head_quantization")


def build_parser() -> Parser:
    """Build the parser of `diffuplug eval`."""
    parser = Parser(prog="diffuplug eval")
    add_count(parser, "--limit", "number of problems (default: 500, with --all 200)")
    words = "every strategy and policy; writes decoding.md and .png"
    add_switch(parser, "--all", words)
    words = "the part of --all about refreshes that cost less; writes refreshes.md"
    add_switch(parser, "--refreshes", words)
    words = "of --all and --refreshes (default: benchmarks/reports if there is one, else here)"
    add_value(parser, "--output", "FOLDER", words)
    add_dtype(parser)
    add_switch(parser, "--json", "ask for answers in JSON, held to a schema")
    words = "score windows of these widths: 32,16,8,4,2"
    add_value(parser, "--schedule", "WIDTHS", words)
    for name in QUANTISED:
        add_value(parser, flag_of(name), "Q", "compare with the unquantised engine")
    add_verbose(parser)
    scored = parser.add_argument_group("with --questions or --schedule")
    add_value(scored, "--model", "MODEL", MODEL)
    add_memory_share(scored)
    words = "JSON lines with question and answer"
    add_value(scored, "--questions", "FILE", words)
    add_flags(scored, DECODE_OPTIONS)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Score what the arguments after ``diffuplug eval`` name; return the exit status.

    Raises ValueError with one sentence for options that do not fit together.
    """
    args = build_parser().parse(arguments)
    _check(args)
    if args.model is not None:
        args.model = resolve(args.model)
    else:
        spin_briefly()
    of_any_model = args.schedule is not None or args.questions is not None
    options = engine_options(args) if of_any_model else {}
    if of_any_model:
        from diffuplug_bench.eval import schedules

        widths = schedules.read_widths(args.schedule)
        questions = schedules.read_questions(args.questions, args.limit)
        if args.head_quantization is not None:
            dllm = options["additional_config"]["dllm"]
            dllm["head_quantization"] = args.head_quantization
        schedules.set_widths(options, widths)
        return schedules.run(options, widths, questions, args.verbose)
    if args.all or args.refreshes:
        reports_folder(args.output)
    from diffuplug_bench.eval import every_policy, refreshes, scores  # imports torch

    if args.all:
        return every_policy.run(args.limit, args.dtype, args.output, args.verbose)
    if args.refreshes:
        return refreshes.run(args.limit, args.dtype, args.output, args.verbose)
    changed = {}
    for name in QUANTISED:
        if getattr(args, name) is not None:
            changed[name] = getattr(args, name)
    return scores.compare_ways(args.limit, args.dtype, args.verbose, args.json, changed)


def _check(args: argparse.Namespace) -> None:
    of_any_model = args.schedule is not None or args.questions is not None
    if args.refreshes and (args.all or args.json or of_any_model):
        raise ValueError(
            "--refreshes stands by itself, or a part of --all: leave the other options out"
        )
    if args.json and (args.all or of_any_model):
        raise ValueError(
            "--json is for the two ways of decoding: leave --all, --schedule and "
            "--questions out"
        )
    tables = args.all or args.refreshes
    for name in given(args, QUANTISED):
        if tables:
            raise ValueError(
                f"{flag_of(name)} is for the two ways of decoding, --questions and --schedule: "
                "leave --all and --refreshes out"
            )
    if args.output is not None and not tables:
        raise ValueError("--output is where --all writes: add --all, or --refreshes")
    if of_any_model and args.all:
        raise ValueError(
            "--all has policies of its own: leave it, or --schedule and --questions, out"
        )
    for name in given(args, ("model", "gpu_memory_utilization", *DECODE_OPTIONS)):
        if not of_any_model:
            raise ValueError(f"{flag_of(name)} needs --questions or --schedule")
