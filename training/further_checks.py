"""Check a trained checkpoint with other blocks, canvases and thresholds than its report's.

    python -m training.further_checks dllm_plugin/default_model

prints a Markdown table: plain loops in float32 on evaluation problems that the report leaves out.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from diffuplug_bench.word_problems.chat_prompts import chat_prompt
from diffuplug_bench.word_problems.generator import (
    Problem,
    ask_in_json,
    eval_seeds,
    problem,
)
from dllm_plugin.reference.model import PlainModel
from dllm_plugin.reference.rules import Rules
from training.others import REPLY, unseen_prompts
from training.scores import BLOCKS, D2F, OWN_LOOP, score

SYSTEM = "You are a friendly tutor. Use plain words."  # training has neither sentence
TALK = [("Change the greeting.", "hello.py\nprint('bye')")]
SKIPPED = 600  # evaluation problems that the report may have used
IN_A_CHAT = (D2F, 32, 128, 60)
# name: rules, block length, canvas, problems; D2F runs with the adapter.
CHECKS: dict[str, tuple[Rules, int, int, int]] = {
    "D2F": (D2F, 32, 128, 300),
    "D2F, long canvas": (D2F, 32, 256, 60),
    "D2F, long blocks": (D2F, 64, 256, 60),
    "D2F, short blocks": (D2F, 8, 128, 60),
    "D2F, threshold 0.99": (replace(D2F, threshold=0.99), 32, 128, 60),
    "D2F, threshold 0.999": (replace(D2F, threshold=0.999), 32, 128, 60),
    "D2F, threshold 1": (replace(D2F, threshold=1.0), 32, 128, 40),
    "block diffusion, short blocks": (BLOCKS, 8, 96, 16),
    "block diffusion, long blocks": (BLOCKS, 64, 128, 10),
    "semi-autoregressive, short blocks": (OWN_LOOP, 8, 96, 10),
    "semi-autoregressive, long blocks": (OWN_LOOP, 64, 256, 6),
}


def chats(problems: list[Problem]) -> dict[str, list[str]]:
    """Put each problem into chats: what they are called, and its prompts."""
    prompts = unseen_prompts()
    made: dict[str, list[str]] = {}
    for i, one in enumerate(problems):
        turns = [
            (other.question, other.answer)
            for other in (problems[i - 1], problems[i - 2])
        ]
        prompt = (prompts[i % len(prompts)], REPLY)
        for name, system, earlier in (
            ("behind a system prompt", SYSTEM, []),
            ("behind another problem", None, turns[:1]),
            ("behind other talk", None, TALK),
            ("behind a system prompt and two problems", SYSTEM, turns),
            ("behind a prompt of another kind", None, [prompt]),
        ):
            made.setdefault(name, []).append(chat_prompt(one.question, system, earlier))
    return made


def main() -> None:
    """Score every check, free and in JSON, and D2F in chats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", type=Path, help="folder of the checkpoint, with its adapter d2f"
    )
    folder = parser.parse_args().model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    base = PlainModel.load(folder)
    merged = PlainModel.load(folder, adapter=folder / "d2f")
    free = [problem(seed) for seed in eval_seeds(1000)[SKIPPED:]]
    print(
        "| loop | form | block | canvas | correct | tokens per forward |\n"
        + "| --- " * 6
        + "|"
    )
    for form, problems in (
        ("free", free),
        ("JSON", [ask_in_json(one) for one in free]),
    ):
        prompts = {f"D2F, {name}": texts for name, texts in chats(problems).items()}
        for name, check in (CHECKS | dict.fromkeys(prompts, IN_A_CHAT)).items():
            rules, block, length, count = check
            model = merged if name.startswith("D2F") else base
            texts = prompts[name][:count] if name in prompts else None
            rules = replace(rules, block_length=block)
            asked = problems[:count]
            found = score(model, rules, asked, tokenizer, length, texts)
            right = f"{round(found['accuracy'] * count)} of {count}"
            speed = found["tokens_per_forward"]
            print(
                f"| {name} | {form} | {block} | {length} | {right} | {speed:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
