"""Score a trained checkpoint by every loop, and add the scores to its run's numbers.

    python -m training.scores OUT REPORT

does so for a run that ended before its scores; `training.train` does it by itself. Loops that
decide one token in each forward are scored on a GPU only: they take sixty times as many forwards.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from diffuplug_bench.word_problems.chat_prompts import EOS, EOT, chat_prompt, token_id
from diffuplug_bench.word_problems.generator import Problem, ask_in_json, problems_of
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from dllm_plugin.reference.text import Text
from training.others import REPLY, unseen_prompts
from training.report import read_numbers, write_numbers

D2F = Rules("d2f", block_length=32)
BLOCKS = Rules("block_diffusion", "low_confidence", block_length=32)
OWN_LOOP = Rules("semi_autoregressive", "low_confidence", block_length=32)
DUAL_CACHE = Rules("dual_cache", block_length=32)
# name: rules, and whether the adapter is merged
LOOPS: dict[str, tuple[Rules, bool]] = {
    "semi_autoregressive": (OWN_LOOP, False),
    "block_diffusion": (BLOCKS, False),
    "dual_cache": (DUAL_CACHE, False),
    "d2f": (D2F, True),
    "d2f_block16": (replace(D2F, block_length=16), True),
    "d2f_without_adapter": (D2F, False),
}


def score(
    model: PlainModel,
    rules: Rules,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    max_new_tokens: int,
    prompts: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Score one loop: accuracy, exact texts, and tokens (including EOS) per forward.

    `prompts` are those of `problems` in chats; by default each is the only message.
    """
    prompts = prompts or [chat_prompt(p.question) for p in problems]
    stops = {token_id(tokenizer, EOS), token_id(tokenizer, EOT)}
    right = exact = tokens = forwards = 0
    for prompt, p in zip(prompts, problems, strict=True):
        ids = tokenizer.encode(prompt).ids
        found = decode(Text(model, ids, max_new_tokens, rules, stops))
        answer = [token for token in found.tokens if token not in stops]
        text = tokenizer.decode(answer)
        right += p.is_right(text)
        exact += text == p.answer
        tokens += len(found.tokens)
        forwards += found.forwards
    return {
        "problems": len(problems),
        "accuracy": right / len(problems),
        "exact_text": exact / len(problems),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": round(tokens / forwards, 3),
        "block": rules.block_length,
        "max_new_tokens": max_new_tokens,
    }


def add_scores(out: Path, report: Path, device: torch.device) -> None:
    """Score loops on the held-out problems, from the files just written."""
    numbers = read_numbers(report)
    numbers["scores"] = scores = {}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    free = problems_of(numbers["eval_problems"])
    in_json = [ask_in_json(p) for p in free]
    others = [Problem(text, REPLY, 0) for text in unseen_prompts()]
    for suffix, problems in (("", free), ("_json", in_json), ("_others", others)):
        for name, (rules, adapted) in LOOPS.items():
            if rules.policy == "low_confidence" and device.type == "cpu":
                continue
            # bfloat16 throughout, as in an engine
            in_bf16 = name in ("block_diffusion", "d2f")
            for dtype in [torch.float32, torch.bfloat16][: 1 + in_bf16]:
                label = name + suffix + ("_bf16" if dtype == torch.bfloat16 else "")
                model = PlainModel.load(
                    out,
                    dtype=dtype,
                    device=str(device),
                    adapter=out / "d2f" if adapted else None,
                )
                length = numbers["max_new_tokens"]
                scores[label] = score(model, rules, problems, tokenizer, length)
                if suffix == "_others":  # right is the reply, as a whole
                    scores[label]["accuracy"] = scores[label]["exact_text"]
                print(label, json.dumps(scores[label]), flush=True)
                write_numbers(report, numbers)


def main() -> None:
    """Score the checkpoint of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("report", type=Path, help="folder of the run's numbers")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    add_scores(args.out, args.report, device)


if __name__ == "__main__":
    main()
