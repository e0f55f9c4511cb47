"""Run the decoding loops that the models' authors published, as the baseline of ``--vs hf``.

They run a plain transformers model: no KV cache, no adapter, batch 1, bidirectional
scaled-dot-product attention. Sources, both greedy: LLaDA ``generate.py`` (``generate``,
``remasking="low_confidence"``), Dream ``generation_utils.py`` (``_sample``,
``alg="maskgit_plus"``). Suffixes: T positions, V vocabulary.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffuplug_bench.model_shapes import Config, autoregressive_config
from dllm_plugin import default_model

LLADA_BLOCK = 32
EPS = 1e-3  # where Dream's time schedule ends

Logits = Callable[[Tensor], Tensor]


def check(config: Config) -> None:
    """Raise ValueError for models whose loop is not here."""
    if config["model_type"] not in LOOPS:
        raise ValueError(
            f"--vs hf knows the loops of LLaDA and Dream, not of {config['model_type']!r}: leave "
            "it out."
        )


def build(config: Config, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build the transformers model of these shapes, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = autoregressive_config(config)
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    with device:
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def bidirectional_logits(model: nn.Module) -> Logits:
    """Return a function from token ids ``[1, T]`` to logits ``[1, T, V]`` under full attention.

    Raises ValueError if the installed transformers attends causally nevertheless.
    """

    def logits(tokens_1T: Tensor) -> Tensor:
        # Reaches the attention function, which without a mask reads only this argument.
        return model(input_ids=tokens_1T, use_cache=False, is_causal=False).logits

    tokens_1T = torch.arange(1, 17, device=next(model.parameters()).device)[None]
    other_1T = tokens_1T.clone()
    other_1T[0, -1] = 0
    if torch.equal(logits(tokens_1T)[0, 0], logits(other_1T)[0, 0]):
        raise ValueError(
            "--vs hf: this transformers version attends causally: leave it out."
        )
    return logits


def llada(
    logits: Logits,
    prompt: list[int],
    length: int,
    steps: int,
    mask_id: int,
    device: torch.device,
) -> tuple[list[int], int]:
    """Decode block after block; each step unmasks the block's most confident positions."""
    tokens_1T = torch.full((1, len(prompt) + length), mask_id, device=device)
    tokens_1T[0, : len(prompt)] = torch.tensor(prompt, device=device)
    blocks = max(1, length // LLADA_BLOCK)
    forwards = 0
    for block in range(blocks):
        stop = len(prompt) + (length * (block + 1)) // blocks
        share = steps * (block + 1) // blocks - steps * block // blocks
        quotas = _quotas(int((tokens_1T[0, :stop] == mask_id).sum()), max(1, share))
        for quota in quotas:
            masked_1T = tokens_1T == mask_id
            logits_1TV = logits(tokens_1T)
            forwards += 1
            best_1T = logits_1TV.argmax(-1)
            chances = torch.softmax(logits_1TV, -1)
            confidence_1T = chances.gather(-1, best_1T[..., None])[..., 0]
            confidence_1T = torch.where(masked_1T, confidence_1T, -torch.inf)
            confidence_1T[:, stop:] = -torch.inf
            chosen = confidence_1T[0].topk(quota).indices
            tokens_1T[0, chosen] = best_1T[0, chosen]
    return tokens_1T[0, len(prompt) :].tolist(), forwards


def _quotas(masked: int, steps: int) -> list[int]:
    """Divide evenly over the steps, the remainder first (``get_num_transfer_tokens``)."""
    return [masked // steps + (i < masked % steps) for i in range(min(steps, masked))]


def dream(
    logits: Logits,
    prompt: list[int],
    length: int,
    steps: int,
    mask_id: int,
    device: torch.device,
) -> tuple[list[int], int]:
    """Decode the whole canvas by time steps; logits at i predict position i + 1."""
    tokens_1T = torch.full((1, len(prompt) + length), mask_id, device=device)
    tokens_1T[0, : len(prompt)] = torch.tensor(prompt, device=device)
    times = torch.linspace(1, EPS, steps + 1).tolist()
    for step in range(steps):
        logits_1TV = logits(tokens_1T)
        logits_1TV = torch.cat([logits_1TV[:, :1], logits_1TV[:, :-1]], 1)
        (where,) = torch.nonzero(tokens_1T[0] == mask_id, as_tuple=True)
        confidence, best = torch.softmax(logits_1TV[0, where], -1).max(-1)
        left = len(where)
        quota = (
            left
            if step == steps - 1
            else int(left * (1 - times[step + 1] / times[step]))
        )
        chosen = confidence.topk(quota).indices
        tokens_1T[0, where[chosen]] = best[chosen]
    return tokens_1T[0, len(prompt) :].tolist(), steps


LOOPS = {"llada": llada, "Dream": dream}


@torch.inference_mode()
def measure(
    config: Config,
    prompt: list[int],
    length: int,
    rates: list[float],
    device_name: str,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Measure `length` tokens after `prompt`, once for each number of tokens per forward."""
    device = torch.device(device_name)
    logits, loop = (
        bidirectional_logits(build(config, device, dtype)),
        LOOPS[config["model_type"]],
    )
    mask_id = config["mask_token_id"]
    loop(logits, prompt, length, 2, mask_id, device)  # warm-up
    rows = []
    for rate in rates:
        started = time.perf_counter()
        tokens, forwards = loop(
            logits, prompt, length, round(length / rate), mask_id, device
        )
        seconds = (
            time.perf_counter() - started
        )  # the loop has returned the tokens to the host
        rows.append(_row(len(tokens), forwards, seconds) | {"input_len": len(prompt)})
    return rows


@torch.inference_mode()
def measure_bundled(
    count: int, length: int, device_name: str, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Measure LLaDA's loop on the bundled model, one token per step, problem by problem."""
    from tokenizers import Tokenizer

    from dllm_plugin.commands.problems.generator import eval_seeds, problem
    from dllm_plugin.reference import decoding
    from dllm_plugin.reference.small_model import Shape, load_weights

    folder, device = Path(default_model.path()), torch.device(device_name)
    weights = {
        name: tensor.to(device, dtype) for name, tensor in load_weights(folder).items()
    }
    tokenizer, shape = (
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        Shape.load(folder),
    )

    def solve(seed: int) -> Any:
        problems = [problem(seed)]
        canvas = decoding.make_canvas(
            weights, shape, tokenizer, problems, length, LLADA_BLOCK
        )
        return decoding.score(decoding.semi_autoregressive, canvas, problems, tokenizer)

    seeds = list(eval_seeds(count))
    solve(seeds[0])  # warm-up
    started = time.perf_counter()
    scores = [solve(seed) for seed in seeds]
    seconds = time.perf_counter() - started
    tokens, forwards = (
        sum(score[name] for score in scores) for name in ("tokens", "forwards")
    )
    accuracy = sum(score["accuracy"] for score in scores) / count
    return [_row(tokens, forwards, seconds) | {"accuracy": accuracy}]


def _row(tokens: int, forwards: int, seconds: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "forwards": forwards,
        "seconds": seconds,
        "tokens_per_forward": tokens / forwards,
        "tokens_per_s": tokens / seconds,
        "ms_per_forward": 1e3 * seconds / forwards,
    }
