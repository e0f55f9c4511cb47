"""Measure the authors' decoding loops on a plain transformers model, for ``--vs hf``.

The loops are those of `dllm_plugin.reference`: LLaDA ``generate.py`` (``generate``,
``remasking="low_confidence"``, blocks of 32) and Dream ``generation_utils.py``
(``_sample``, ``alg="maskgit_plus"``), both greedy. The model has no KV cache, no adapter,
batch 1 and bidirectional scaled-dot-product attention.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffuplug_bench.model_shapes import Config, autoregressive_config
from dllm_plugin import default_model
from dllm_plugin.reference.loops import decode
from dllm_plugin.reference.rules import SEMI_AUTOREGRESSIVE, Rules
from dllm_plugin.reference.text import Result, Slots, Text

LLADA_BLOCK = 32
FAMILIES = {"llada": False, "Dream": True}  # and whether their logits are shifted


def check(config: Config) -> None:
    """Raise ValueError for models whose loop is not here."""
    if config["model_type"] not in FAMILIES:
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


class Bidirectional:
    """Compute a transformers model under full attention, as the plain loops call it.

    Raises ValueError if the installed transformers attends causally nevertheless.
    """

    def __init__(self, model: nn.Module, shift: bool, mask_id: int) -> None:
        self.model, self.shift, self.mask_id = model, shift, mask_id
        self.device = next(model.parameters()).device
        tokens = list(range(1, 17))
        first, other = self.rows(tokens)[0], self.rows([*tokens[:-1], 0])[0]
        if torch.equal(first, other):
            raise ValueError(
                "--vs hf: this transformers version attends causally: leave it out."
            )

    @torch.inference_mode()
    def rows(self, tokens: list[int]) -> Tensor:
        """Compute logits ``[N, V]`` of a text that sees itself."""
        tokens_1T = torch.tensor([tokens], device=self.device)
        # Reaches the attention function, which without a mask reads only this argument.
        logits_1TV = self.model(input_ids=tokens_1T, use_cache=False, is_causal=False)
        return logits_1TV.logits[0]

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> Tensor:
        """Compute as `rows`; the authors' own loops keep nothing in `slots`."""
        assert start == 0, "a forward without a cache starts with the text"
        return self.rows(tokens)

    def predictions(self, tokens: list[int], block: list[int]) -> Tensor:
        """Raise: a transformers model takes no mask of blocks."""
        raise NotImplementedError


def rules_of(family: str, length: int, steps: float) -> Rules:
    """Return the options of a family's own loop that decodes `length` tokens in steps.

    Dream decodes the whole text as one block. LLaDA's blocks are of about 32, equally long
    as far as the length allows, and take equally many steps.
    """
    blocks = max(1, length // LLADA_BLOCK) if family == "llada" else 1
    block = -(-length // blocks)
    per_block = max(1, round(steps * block / length))
    return Rules(
        SEMI_AUTOREGRESSIVE, "low_confidence", block_length=block, steps=per_block
    )


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
    family, device = config["model_type"], torch.device(device_name)
    model = Bidirectional(
        build(config, device, dtype), FAMILIES[family], config["mask_token_id"]
    )

    def run(rate: float) -> Result:
        rules = rules_of(family, length, length / rate)
        return decode(Text(model, prompt, length, rules))

    run(length / 2)  # warm-up
    rows = []
    for rate in rates:
        started = time.perf_counter()
        found = run(rate)
        seconds = time.perf_counter() - started  # the tokens are on the host
        row = _row(len(found.tokens), found.forwards, seconds)
        rows.append(row | {"input_len": len(prompt)})
    return rows


@torch.inference_mode()
def measure_bundled(
    count: int, length: int, device_name: str, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Measure LLaDA's loop on the bundled model, one token per step, problem by problem."""
    from diffuplug_bench.word_problems.chat_prompts import prompts_of, read_tokenizer
    from diffuplug_bench.word_problems.generator import problems_of
    from dllm_plugin.reference.model import PlainModel

    folder = Path(default_model.path())
    model = PlainModel.load(folder, dtype=dtype, device=device_name)
    tokenizer, stops = read_tokenizer(folder)
    rules = rules_of("llada", length, length)
    problems = problems_of(count)
    prompts = prompts_of(tokenizer, problems)
    decode(Text(model, prompts[0], length, rules, stops))  # warm-up
    started = time.perf_counter()
    found = [decode(Text(model, ids, length, rules, stops)) for ids in prompts]
    seconds = time.perf_counter() - started
    right = 0
    for p, one in zip(problems, found, strict=True):
        answer = [token for token in one.tokens if token not in stops]
        right += p.is_right(tokenizer.decode(answer))
    tokens = sum(len(one.tokens) for one in found)
    forwards = sum(one.forwards for one in found)
    return [_row(tokens, forwards, seconds) | {"accuracy": right / count}]


def _row(tokens: int, forwards: int, seconds: float) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "forwards": forwards,
        "seconds": seconds,
        "tokens_per_forward": tokens / forwards,
        "tokens_per_s": tokens / seconds,
        "ms_per_forward": 1e3 * seconds / forwards,
    }
