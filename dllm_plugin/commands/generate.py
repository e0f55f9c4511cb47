"""Run ``diffuplug generate``: answer one prompt with an engine in this process."""

import argparse
import json
import os
import sys
import time
from typing import Any

from .models import check_length
from .offline import (
    collecting_later,
    engine_options,
    num_forwards,
    start_engine,
    stop_engine,
    stream_answer,
)
from .options import (
    add_max_tokens,
    add_model_options,
    add_sampling,
    add_switch,
    add_value,
    add_verbose,
    share,
    text_of,
)


def add_parser(commands: Any) -> None:
    """Add the parser of `diffuplug generate`."""
    parser = commands.add_parser("generate")
    parser.add_argument("prompt", help="text, or - to read standard input")
    add_model_options(parser)
    sampling = add_sampling(parser)
    add_max_tokens(sampling, 256)
    words = "1 is off (default: 1)"
    add_value(sampling, "--top-p", "P", words, type=share, default=1.0)
    form_of_answer = parser.add_argument_group("form of the answer")
    shape = form_of_answer.add_mutually_exclusive_group()
    words = "answer in JSON that fits a schema, given here or in a file"
    add_value(shape, "--json-schema", "S", words)
    add_value(shape, "--regex", "R", "answer what a regular expression matches")
    add_value(shape, "--choice", "A,B", "answer one of these words")
    add_verbose(parser)
    form = form_of_answer.add_mutually_exclusive_group()
    words = "do not apply the chat template (default: apply it if there is one)"
    add_switch(form, "--chat", "apply the chat template")
    form.add_argument("--raw", dest="chat", action="store_false", help=words)
    parser.set_defaults(run=run, chat=None)


def run(args: argparse.Namespace) -> int:
    """Print the answer on standard output while it forms, everything else on standard error."""
    options = engine_options(args)
    check_length("--max-tokens", args.max_tokens, options["model"])
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    grammar = grammar_of(args)
    from .phases import screen

    with screen(args.verbose) as shown:
        with collecting_later():
            from vllm import SamplingParams
            from vllm.sampling_params import StructuredOutputsParams

        sampling = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            structured_outputs=StructuredOutputsParams(**grammar) if grammar else None,
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


def grammar_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the answer has to be, by vLLM's names; nothing if it is free.

    Raises ValueError for what no backend reads.
    """
    if args.json_schema is not None:
        from dllm_plugin.config.grammar_refusals import check_unread_schema

        text, named = args.json_schema, "--json-schema"
        if not text.lstrip().startswith("{"):
            named += f" {text}"
            if not os.path.exists(text):  # pipes, too; long names raise no error
                raise ValueError(f"{named} is neither a JSON object nor a file")
            text = text_of("--json-schema", text)
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{named}: {error}") from None
        if not isinstance(schema, dict):
            raise ValueError(f"{named} holds no JSON object")
        check_unread_schema(named, schema)
        return {"json": schema}
    if args.regex is not None:
        if not args.regex:
            raise ValueError("--regex is empty: write an expression, or leave it out")
        from dllm_plugin.config.grammar_refusals import check_unread_regex

        check_unread_regex("--regex", args.regex)
        return {"regex": args.regex}
    if args.choice is None:
        return {}
    words = [word for word in args.choice.split(",") if word]
    if not words:
        raise ValueError(
            f"--choice {args.choice!r} holds no word: write words with commas between"
        )
    return {"choice": words}


def summary(tokens: int, forwards: int, seconds: float) -> str:
    """Format the tokens, forwards and seconds of an answer."""
    per_forward = tokens / max(forwards, 1)
    return (
        f"{tokens} tokens, {forwards} forwards, {per_forward:.2f} tokens per forward, "
        f"{seconds:.2f} seconds"
    )
