"""Train the bundled model and its D2F adapter, score both, and write every file.

    python -m training.train --out OUT --report REPORT --seed 0

Run it from the repository root. `--base` starts from the weights and the adapter of a checkpoint.
Phase 1 trains the base: masked-diffusion SFT under full and block-causal attention. Phase 2 trains
the adapter as D2F does: block-causal attention, rising mask ratios, and as targets the data and the
frozen base under full attention.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from diffuplug_bench.word_problems.generator import problem, problems_of, train_seeds
from training.checkpoint import (
    initial_adapter,
    initial_weights,
    save_adapter,
    save_base,
)
from training.data import (
    LENGTHS,
    Batch,
    Dataset,
    forms,
    make_batch,
    make_dataset,
    make_problems,
    pick_rows,
    unseen,
    with_chats,
    with_others,
)
from training.model import (
    PADDING_BLOCK,
    Shape,
    Weights,
    forward,
    load_adapter,
    load_weights,
    merge_adapter,
)
from training.others import unseen_prompts
from training.report import CURVE, NUMBERS, plot_losses, read_numbers, write_numbers
from training.scores import add_scores
from training.tokenizer import build_tokenizer, save_tokenizer

LONG_EVERY = 8  # every eighth step uses the second length, with fewer sequences
LONGEST_EVERY = 32  # and every fourth of those the third length
SAVE_EVERY = 100  # steps
PHASES = ("base", "d2f")
Loss = Callable[[Batch], Tensor]
Curve = list[tuple[int, float]]


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the checkpoint"
    )
    parser.add_argument(
        "--report", type=Path, required=True, help="folder for JSON and loss curve"
    )
    parser.add_argument(
        "--base", type=Path, help="checkpoint to start from, with its adapter in d2f"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(25_000, 5_000),
        metavar="N",
        help="optimiser steps of the base phase and of the adapter phase",
    )
    parser.add_argument("--problems", type=int, default=500_000)
    parser.add_argument(
        "--others", type=float, default=0.35, help="share of prompts of other kinds"
    )
    parser.add_argument("--eval-problems", type=int, default=500)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=384, help="batch size")
    parser.add_argument(
        "--rate", type=float, nargs=2, default=(2e-3, 2e-3), metavar="LR"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--bf16-on-cpu", action="store_true", help="for CPUs with bfloat16 units"
    )
    return parser.parse_args()


def run_phase(
    name: str,
    params: list[Tensor],
    loss_of: Loss,
    data: Dataset,
    args: argparse.Namespace,
    rng: torch.Generator,
    save: Callable[[], None],
) -> Curve:
    """Train one phase with AdamW and linear decay; return (step, mean loss) points."""
    which = PHASES.index(name)
    steps, rate = args.steps[which], args.rate[which]
    matrices = [p for p in params if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.02 if name == "base" else 0.0},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    cuda = params[0].is_cuda
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=cuda)
    curve: Curve = []
    recent = torch.zeros((), device=params[0].device)
    begin = time.monotonic()
    bar = tqdm(range(steps), desc=name, mininterval=10)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 200) * (1 - step / steps)
        which = int((step + 1) % LONG_EVERY == 0) + int((step + 1) % LONGEST_EVERY == 0)
        rows = args.rows
        if which:
            rows = max(8, args.rows * LENGTHS[0] // LENGTHS[which] // 8 * 8)
        picks = pick_rows(data, rows, which, rng)
        batch = make_batch(data, picks, LENGTHS[which], name == "d2f", rng)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += loss.detach()
        if step % 50 == 49:
            curve.append((step + 1, recent.item() / 50))
            recent.zero_()
            bar.set_postfix(loss=f"{curve[-1][1]:.4f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0:
            save()
    save()
    print(f"{name}: {steps} steps in {time.monotonic() - begin:.0f} s", flush=True)
    return curve


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Compute the weighted cross entropy of masked positions, divided by the batch's scale."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.flatten(), reduction="none"
    )
    return (losses * batch.weights.flatten()).sum() / batch.scale


def base_loss(
    weights: Weights, shape: Shape, run: Callable[..., Tensor], bf16: bool
) -> Loss:
    """Return LLaDA's SFT loss for the base weights."""

    def loss(batch: Batch) -> Tensor:
        kind = batch.inputs.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=bf16):
            logits = run(weights, shape, batch.inputs, batch.blocks)
        return cross_entropy(logits, batch)

    return loss


def d2f_loss(
    weights: Weights,
    adapter: Weights,
    scale: float,
    shape: Shape,
    run: Callable[..., Tensor],
    bf16: bool,
) -> Loss:
    """Return D2F's loss: cross entropy to the data plus KL to the base under full attention."""

    def loss(batch: Batch) -> Tensor:
        kind = batch.inputs.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=bf16):
            padding = batch.blocks == PADDING_BLOCK
            with torch.no_grad():
                wanted = run(weights, shape, batch.inputs, padding.long())
            logits = run(
                merge_adapter(weights, adapter, scale),
                shape,
                batch.inputs,
                batch.blocks,
            )
        goal = wanted.float().log_softmax(-1)
        distance = F.kl_div(
            logits.float().log_softmax(-1), goal, reduction="none", log_target=True
        )
        distance = (distance.sum(-1) * batch.weights).sum() / batch.scale
        return cross_entropy(logits, batch) + 0.5 * distance

    return loss


def trainable(tensors: Weights, device: torch.device) -> dict[str, Tensor]:
    """Copy `tensors` to `device`, with gradients."""
    return {name: t.to(device).requires_grad_() for name, t in tensors.items()}


def prepare(
    args: argparse.Namespace, device: torch.device
) -> tuple[Tokenizer, Dataset]:
    """Write the tokenizer to `args.out`; return it and the rows that are not held out."""
    held_out = {p.question for p in problems_of(args.eval_problems)}
    processes = min(16, len(os.sched_getaffinity(0)))
    sample = [problem(s) for s in train_seeds(min(20_000, args.problems))]
    if args.base is None:
        texts = (text for p in sample for text in (p.question, p.answer))
        tokenizer = build_tokenizer(texts)
    else:
        tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    save_tokenizer(tokenizer, args.out)
    fresh = unseen(make_problems(train_seeds(args.problems), processes), held_out)
    rows = with_chats(with_others(forms(fresh), args.others, set(unseen_prompts())))
    return tokenizer, make_dataset(rows, tokenizer, device)


def train(
    args: argparse.Namespace, tokenizer: Tokenizer, data: Dataset, device: torch.device
) -> dict[str, Curve]:
    """Run both phases; write base, adapter and loss curves as soon as there are any."""
    cpu_rng = torch.Generator().manual_seed(args.seed)
    rng = torch.Generator(device).manual_seed(args.seed)
    shape = Shape()
    run = forward if args.no_compile else torch.compile(forward, dynamic=False)

    bf16 = device.type == "cuda" or args.bf16_on_cpu
    start: Weights = initial_weights(shape, cpu_rng)
    if args.base is not None:
        start = load_weights(args.base)
    base = trainable(start, device)

    curves = {}
    if args.steps[0]:
        loss = base_loss(base, shape, run, bf16)
        save = partial(save_base, args.out, base, shape, tokenizer)
        params = list(base.values())
        curves["base"] = run_phase("base", params, loss, data, args, rng, save)
    else:
        save_base(args.out, base, shape, tokenizer)
        if (args.report / NUMBERS).exists():
            curves["base"] = read_numbers(args.report)["curves"]["base"]
    write_numbers(args.report, {"curves": curves})

    frozen = {n: t.to(device) for n, t in load_weights(args.out).items()}
    start = initial_adapter(frozen, args.rank, cpu_rng)
    if args.base is not None and (args.base / "d2f").is_dir():
        start = load_adapter(args.base / "d2f")
    adapter = trainable(start, device)
    loss = d2f_loss(frozen, adapter, args.alpha / args.rank, shape, run, bf16)
    save = partial(save_adapter, args.out / "d2f", adapter, args.rank, args.alpha)
    params = list(adapter.values())
    curves["d2f"] = run_phase("d2f", params, loss, data, args, rng, save)
    return curves


def main() -> None:
    """Train, write the checkpoint and the report's numbers, and score."""
    args = parse_args()
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    args.report.mkdir(parents=True, exist_ok=True)
    tokenizer, data = prepare(args, device)
    ready = time.monotonic() - started
    print(f"{len(data)} training rows after {ready:.0f} s", flush=True)
    curves = train(args, tokenizer, data, device)
    settings = {
        n: v for n, v in vars(args).items() if n not in ("out", "report", "base")
    }
    summary = settings | {
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "training_rows": len(data),
        "distinct_problems": data.num_problems,
        "parameters": sum(t.numel() for t in load_weights(args.out).values()),
        "steps": {name: args.steps[PHASES.index(name)] for name in curves},
        "seconds": round(time.monotonic() - started),
    }
    write_numbers(args.report, summary | {"curves": curves})
    plot_losses(curves, args.report / CURVE)
    print(json.dumps(summary), flush=True)
    add_scores(args.out, args.report, device)


if __name__ == "__main__":
    main()
