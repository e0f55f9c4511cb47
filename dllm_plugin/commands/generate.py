"""Run ``diffuplug generate``: answer one prompt with an engine in this process."""

import argparse
import sys

from dllm_plugin.commands.offline import (
    collecting_later,
    conversation,
    engine_options,
    num_forwards,
    start_engine,
)


def run(args: argparse.Namespace) -> int:
    """Print the answer on standard output and one line of statistics on standard error."""
    options = engine_options(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    with collecting_later():
        from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    llm = start_engine(options)
    chat = args.chat
    if chat is None:
        chat = getattr(llm.get_tokenizer(), "chat_template", None) is not None
    if chat:
        (output,) = llm.chat(conversation(prompt), sampling)
    else:
        (output,) = llm.generate([prompt], sampling)
    print(output.outputs[0].text)
    tokens, forwards = len(output.outputs[0].token_ids), num_forwards(output)
    per_forward = tokens / max(forwards, 1)
    print(f"{tokens} tokens, {forwards} forwards, {per_forward:.2f} each", file=sys.stderr)
    return 0
