"""Score a trained checkpoint by every loop, and add the scores to its run's numbers.

    python -m training.scores OUT REPORT

does so for a run that ended before its scores; `training.train` does it by itself.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dllm_plugin.commands.problems.generator import ask_in_json, eval_seeds, problem
from dllm_plugin.reference.decoding import LOOPS, make_canvas, score
from dllm_plugin.reference.small_model import Shape, load_weights
from training.report import read_numbers, write_numbers


def add_scores(out: Path, report: Path, device: torch.device) -> None:
    """Score loops on the held-out problems in float32, from the files just written."""
    numbers = read_numbers(report)
    numbers["scores"] = scores = {}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    shape = Shape.load(out)
    base = {n: t.to(device) for n, t in load_weights(out).items()}
    merged = {n: t.to(device) for n, t in load_weights(out, out / "d2f").items()}
    free = [problem(s) for s in eval_seeds(numbers["eval_problems"])]
    for suffix, problems in (("", free), ("_json", [ask_in_json(p) for p in free])):
        for name, (loop, block, adapted) in LOOPS.items():
            weights = merged if adapted else base
            tried = {name + suffix: weights}
            if name in (
                "block_diffusion",
                "d2f",
            ):  # bfloat16 throughout, as in an engine
                tried[f"{name}{suffix}_bf16"] = {
                    n: t.bfloat16() for n, t in weights.items()
                }
            for label, these in tried.items():
                length = numbers["max_new_tokens"]
                canvas = make_canvas(these, shape, tokenizer, problems, length, block)
                scores[label] = score(loop, canvas, problems, tokenizer)
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
