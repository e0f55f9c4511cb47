"""Run ``diffuplug infill``: fill the gaps of a text with an engine in this process."""

import argparse
import time
from typing import Any

from dllm_plugin.commands.generate import summary
from dllm_plugin.commands.offline import (
    collecting_later,
    conversation,
    engine_options,
    num_forwards,
    start_engine,
    stop_engine,
)
from dllm_plugin.config.gaps import filled, parts_of_text, place, together
from dllm_plugin.config.options import TEMPLATE

STRATEGY = "dual_cache"  # where nothing is asked for: a gap needs full attention
EXAMPLE = "The capital of [MASK:3] is [MASK:8]."


def run(args: argparse.Namespace) -> int:
    """Print the text with its gaps filled, and what it took on standard error."""
    args.strategy = args.strategy or STRATEGY
    options, parts = engine_options(args), parts_of_text(args.text)
    from dllm_plugin.commands.phases import screen

    with screen(args.verbose) as shown:
        with collecting_later():
            from vllm import SamplingParams
        llm = start_engine(options, shown.log)
        shown.end("ready")
        tokenizer: Any = llm.get_tokenizer()
        prompt = None if args.question is None else _chat(args.question, tokenizer)
        gapped = place(
            parts,
            prompt,
            lambda part: list(tokenizer.encode(part)),
            lambda part: list(tokenizer.encode(part, add_special_tokens=False)),
        )
        sampling = SamplingParams(
            max_tokens=gapped.end,
            temperature=args.temperature,
            seed=args.seed,
            extra_args={TEMPLATE: gapped.template},
        )
        start = time.perf_counter()
        (output,) = llm.generate({"prompt_token_ids": gapped.prompt}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = list(output.outputs[0].token_ids)
        ends = {tokenizer.eos_token_id}
        gaps = filled(gapped, tokens, ends, lambda ids: str(tokenizer.decode(ids)))
        shown.out.write(together(gapped, gaps) + "\n")
        shown.out.flush()
        shown.note(summary(len(tokens), num_forwards(output), seconds))
        stop_engine(llm)
    return 0


def _chat(question: str, tokenizer: Any) -> list[int]:
    """Return a question as the chat template writes it, up to where its answer begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        conversation(question), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids
