"""What quantised forms cost in accuracy: bundled model, and random layers of 8B sizes.

    python benchmarks/quantised_error.py engines 100
    python benchmarks/quantised_error.py loops 100
    python benchmarks/quantised_error.py layers

`engines` decodes stored checkpoints in CPU engines, by vLLM's kernels; of FP8 only weights are
rounded, as its GEMMs there take minutes for a step of these sizes. `loops` rounds weights,
activations, keys and values in the plain loop, which computes in float32; so the forms of GPUs run
too. `layers` compares logits behind two layers with those of float32. Each prints a Markdown table.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_plugin import default_model
from dllm_plugin.models.checkpoints.quantised import quantise_rows
from dllm_plugin.reference.model import PlainModel, Turns
from dllm_plugin.reference.sizes import Sizes
from dllm_plugin.reference.text import Text

TESTS = Path(__file__).parents[1] / "tests"
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = 448.0
GROUP = (
    32  # inputs of the bundled model that share a scale of 4 bits; 128 in the layers
)
STORED = ("rounded", "int", "pack-quantized", "awq", "gptq")
STORED_NAMES = {
    "rounded": "weights rounded to FP8 per channel, stored in 16 bits",
    "int": "INT8, scales per channel and token",
    "pack-quantized": "W4A16, compressed-tensors",
    "awq": "W4A16, AWQ's layout",
    "gptq": "W4A16, GPTQ's layout",
}
MAX_TOKENS = 256


@dataclass(frozen=True)
class Form:
    """List what a form rounds; None: nothing.

    weights      of the layers: float8 per row or per matrix, int8 per row, or `int4` in groups
    activations  of the layers, per row
    cache        queries, keys and values, to float8 with scale 1
    head         weight and hidden states of the LM head, per row
    """

    weights: torch.dtype | str | None = None
    activations: torch.dtype | None = None
    cache: bool = False
    head: torch.dtype | None = None


FP8 = Form(FLOAT8, FLOAT8)
FORMS = {
    "unquantised": Form(),
    "fp8_per_channel": FP8,
    "fp8_per_tensor": replace(FP8, weights="tensor"),
    "fp8_per_channel, fp8 KV": replace(FP8, cache=True),
    "fp8_per_channel, fp8 KV, fp8 head": replace(FP8, cache=True, head=FLOAT8),
    "fp8_per_channel, fp8 KV, int8 head": replace(FP8, cache=True, head=INT8),
    "fp8 KV alone": Form(cache=True),
    "fp8 head alone": Form(head=FLOAT8),
    "int8 head alone": Form(head=INT8),
    "INT8 (W8A8)": Form(INT8, INT8),
    "W4A16": Form("int4"),
    "W4A16, fp8 KV, fp8 head": Form("int4", cache=True, head=FLOAT8),
}


@dataclass(frozen=True)
class RoundedModel(PlainModel):
    """Compute in float32 from rounded numbers; `weights` are rounded beforehand."""

    form: Form = Form()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        form = self.form
        kind = form.head if name == "lm_head" else form.activations
        return super()._linear(x if kind is None else rounded(x, kind), name)

    def _heads(self, x: Tensor, name: str, turns: Turns) -> list[Tensor]:
        found = super()._heads(x, name, turns)
        if not self.form.cache:
            return found
        return [y.clamp(-LARGEST, LARGEST).to(FLOAT8).float() for y in found]


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows as a scale per row and `dtype` represent them."""
    stored, scale = quantise_rows(rows, dtype)
    return stored.float() * scale


def rounded_weight(weight: Tensor, kind: torch.dtype | str, group: int) -> Tensor:
    """Return a matrix ``[N, K]`` as a form represents it."""
    if isinstance(kind, torch.dtype):
        return rounded(weight, kind)
    if kind == "tensor":
        return rounded(weight.view(1, -1), FLOAT8).view_as(weight)
    grouped = weight.unflatten(1, (-1, group))
    scale = grouped.abs().amax(2, keepdim=True).clamp_min(1e-6) / 7
    return ((grouped / scale).round().clamp(-8, 7) * scale).flatten(1)


def quantised(plain: PlainModel, form: Form, group: int) -> RoundedModel:
    """Return a model with the rounded weights of a form."""
    weights = {}
    for name, weight in plain.weights.items():
        kind: torch.dtype | str | None = None
        if name == "lm_head.weight":
            kind = form.head
        elif weight.dim() == 2 and name != "model.embed_tokens.weight":
            kind = form.weights
        weights[name] = weight if kind is None else rounded_weight(weight, kind, group)
    return RoundedModel(**vars(plain) | {"weights": weights}, form=form)


def loops(limit: int) -> None:
    """Decode the bundled model's problems in the plain loop, in every form."""
    from diffuplug_bench.word_problems.chat_prompts import prompts_of, read_tokenizer
    from diffuplug_bench.word_problems.generator import problems_of
    from dllm_plugin.reference.loops import decode
    from dllm_plugin.reference.rules import Rules

    torch.set_num_threads(1)  # GEMMs this small lose by a second thread
    folder = Path(default_model.path())
    tokenizer, stops = read_tokenizer(folder)
    problems = problems_of(limit)
    prompts = prompts_of(tokenizer, problems)
    print("| form | strategy | right | tokens per forward | same answers |")
    print("| --- | --- | --- | --- | --- |")
    for strategy in ("block_diffusion", "d2f"):
        adapter = Path(default_model.adapter_path()) if strategy == "d2f" else None
        plain = PlainModel.load(folder, adapter=adapter)
        rules = Rules(strategy, block_length=32, canvas_length=128)
        unquantised: list[list[int]] = []
        for name, form in FORMS.items():
            model, right, forwards = quantised(plain, form, GROUP), 0, 0
            answers = []
            for asked, prompt in zip(problems, prompts, strict=True):
                found = decode(Text(model, prompt, MAX_TOKENS, rules, stops))
                answers.append(found.tokens)
                forwards += found.forwards
                right += asked.is_right(tokenizer.decode(found.tokens))
            unquantised = unquantised or answers
            same = sum(a == b for a, b in zip(answers, unquantised, strict=True))
            rate = sum(map(len, answers)) / forwards
            row = (name, strategy, f"{right / limit:.1%}", f"{rate:.2f}")
            print("|", " | ".join((*row, f"{same / limit:.1%}")), "|", flush=True)


def stored_copies(folder: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Yield the bundled model stored in a form, without and with its merged adapter."""
    from safetensors.torch import load_file, save_file

    from dllm_plugin.models.checkpoints.lora import load_adapter, merge

    sys.path.append(str(TESTS))
    import quantised as formats

    for strategy in ("block_diffusion", "d2f"):
        copy = folder / f"{kind}-{strategy}"
        shutil.copytree(default_model.path(), copy)
        file = copy / "model.safetensors"
        if strategy == "d2f":
            adapter = load_adapter(Path(default_model.adapter_path()))
            merged = dict(merge(load_file(file).items(), adapter))
            save_file(merged, file, metadata={"format": "pt"})
        if kind == "rounded":
            weights = load_file(file)
            for name, weight in weights.items():
                if ".blocks." in name and weight.dim() == 2:
                    weights[name] = rounded(weight, FLOAT8).to(weight.dtype)
            save_file(weights, file, metadata={"format": "pt"})
        elif kind == "int":
            formats.quantise(copy, "tiny-llada", kind)
        elif kind != "plain":
            formats.pack(copy, "tiny-llada", kind)
        yield strategy, copy


def engines(limit: int, *kinds: str) -> None:
    """Decode the bundled model's problems in CPU engines, from stored checkpoints."""
    from diffuplug_bench.eval.scores import answers, score, start_in_process
    from diffuplug_bench.word_problems.generator import (
        ANSWER_SCHEMA,
        ask_in_json,
        problems_of,
    )
    from dllm_plugin.commands.offline import bundled_options, stop_engine

    free = problems_of(limit)
    in_json = [ask_in_json(one) for one in free]
    print("| form | answers | right | tokens per forward | same answers |")
    print("| --- | --- | --- | --- | --- |")
    unquantised: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("plain", *(kinds or STORED)):
            for strategy, path in stored_copies(Path(scratch), kind):
                options = bundled_options({"strategy": strategy, "threshold": 0.9})
                options |= {"model": str(path), "dtype": "bfloat16"}
                engine = start_in_process(options)
                for what, asked, schema in (
                    ("free", free, None),
                    ("JSON", in_json, ANSWER_SCHEMA),
                ):
                    got = answers(engine, asked, MAX_TOKENS, False, schema=schema)
                    found = score(got, asked)
                    ids = [list(one.outputs[0].token_ids) for one in got.outputs]
                    name = f"{what}, {strategy}"
                    first = unquantised.setdefault(name, ids)
                    same = sum(a == b for a, b in zip(ids, first, strict=True))
                    cells = (
                        STORED_NAMES.get(kind, "unquantised"),
                        name,
                        f"{found.accuracy:.1%}",
                        f"{found.tokens_per_forward:.2f}",
                        f"{same / limit:.1%}",
                    )
                    print("|", " | ".join(cells), "|", flush=True)
                stop_engine(engine)


# Heads, KV heads, head size, width, inner width, columns of the LM head that are computed.
SIZES = {
    "LLaDA-8B": (32, 32, 128, 4096, 12288),
    "Dream-7B": (28, 4, 128, 3584, 18944),
}
LAYERS, VOCAB, PROMPT, MASKS = 2, 32768, 128, 32
OUTLIER = 50.0


def random_model(sizes: tuple[int, ...], outlier: bool) -> PlainModel:
    """Return layers of these sizes with random weights, rounded to bfloat16.

    `outlier`: one channel behind every norm is 50 times as large as the others.
    """
    heads, kv_heads, head, width, inner = sizes
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * 0.02
        return values.to(torch.bfloat16).float()

    scale = torch.ones(width)
    if outlier:
        scale[7] = OUTLIER
    weights = {
        "model.embed_tokens.weight": random(PROMPT + 1, width),
        "model.norm.weight": scale,
        "lm_head.weight": random(VOCAB, width),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        weights |= {
            f"{layer}.input_layernorm.weight": scale,
            f"{layer}.post_attention_layernorm.weight": scale,
            f"{attention}.q_proj.weight": random(heads * head, width),
            f"{attention}.k_proj.weight": random(kv_heads * head, width),
            f"{attention}.v_proj.weight": random(kv_heads * head, width),
            f"{attention}.o_proj.weight": random(width, heads * head),
            f"{layer}.mlp.gate_proj.weight": random(inner, width),
            f"{layer}.mlp.up_proj.weight": random(inner, width),
            f"{layer}.mlp.down_proj.weight": random(width, inner),
        }
    shape = (LAYERS, heads, kv_heads, head, 1e-6, 5e5, head, False)
    return PlainModel(weights, Sizes("llada", *shape, raw={}), PROMPT)


def layers(_limit: int) -> None:
    """Compare logits of masks behind a prompt with those of unrounded layers."""
    print("| sizes | inputs | form | error of logits | same token | of clear ones |")
    print("| --- | --- | --- | --- | --- | --- |")
    tokens = [*range(PROMPT), *[PROMPT] * MASKS]
    blocks = [0] * len(tokens)
    for name, sizes in SIZES.items():
        for outlier in (False, True):
            plain = random_model(sizes, outlier)
            wanted = plain.rows(tokens, blocks)[PROMPT:]
            best = wanted.topk(2).values
            # A lead over the second token that is large among these rows.
            clear = (best[:, 0] - best[:, 1]) >= (best[:, 0] - best[:, 1]).median()
            for form_name, form in FORMS.items():
                if form == Form():
                    continue
                model = quantised(plain, form, 128)
                found = model.rows(tokens, blocks)[PROMPT:]
                error = (found - wanted).norm() / wanted.norm()
                same = found.argmax(1) == wanted.argmax(1)
                inputs = "one channel 50 times" if outlier else "even"
                rates = (
                    f"{same.float().mean():.0%}",
                    f"{same[clear].float().mean():.0%}",
                )
                cells = (name, inputs, form_name, f"{error:.3f}", *rates)
                print("|", " | ".join(cells), "|", flush=True)
                del model


def main() -> None:
    """Run the part that the command line names."""
    parts: dict[str, Callable[..., None]] = {
        "engines": engines,
        "loops": loops,
        "layers": layers,
    }
    name, *rest = sys.argv[1:]
    parts[name](int(rest[0]) if rest else 100, *rest[1:])
    print(json.dumps({"part": name, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
