"""What free requests lose beside constrained ones, on dummy weights of a named shape.

    python benchmarks/structured_load.py --shapes llada-8b --requests 64 --constrained 0,1,8,32

The same requests are decoded again and again, with more and more of them held to one of eight
schemas. Free requests decode by a schedule, so they take the same forwards in every run. Every
second request is free in all runs: their tokens per second are printed, and how many of the held
texts are valid. `--grammar` says how the others decode: by `drafts`, by the `automaton`, or `both`,
one after the other on one engine.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from structured_output import eight_schemas
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import dllm_plugin
from diffuplug_bench.engines import Prompts
from diffuplug_bench.model_shapes import SHAPES, Config, write_config
from diffuplug_bench.worker_extension import EXTENSION, fill_weights
from dllm_plugin.commands.offline import start_engine, stop_engine

INPUT, OUTPUT = 512, 128
STEPS = 8  # of a block of 32: four tokens a forward


def write_tokenizer(config: Config, folder: Path) -> str:
    """Write a byte-level tokenizer with a token for each byte and words of letters."""
    size = config.get("embedding_size") or config["vocab_size"]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"w{i}" for i in range(len(pieces), size)]
    pieces[config["eos_token_id"]] = "<eos>"
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    chosen = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chosen), encoding="utf-8")
    return str(folder)


def start(shapes: str, requests: int, share: float | None, scratch: Path) -> Any:
    """Start an engine with room for all requests at once; `share`: of the GPU's memory."""
    config = SHAPES[shapes]
    length = INPUT + OUTPUT + 64
    options = {
        "model": write_config(config, scratch / shapes),
        "tokenizer": write_tokenizer(config, scratch / "tokenizer"),
        "load_format": "dummy",
        "max_model_len": length,
        "max_num_seqs": requests,
        "max_num_batched_tokens": max(8192, length + 32 * requests),
        "worker_extension_cls": EXTENSION,
        "additional_config": {
            "dllm": {"strategy": "block_diffusion", "policy": "low_confidence"}
        },
    }
    if not torch.cuda.is_available():
        options |= {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.2}
    if share is not None:
        options["gpu_memory_utilization"] = share
    llm = start_engine(options)
    fill_weights(llm, 0)
    return llm


def is_valid(text: str, schema: Any) -> bool:
    """Tell whether a text is JSON that fits its schema."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(Draft202012Validator(schema).is_valid(value))


def measure(
    llm: Any, prompts: list[list[int]], constrained: int, way: str
) -> dict[str, Any]:
    """Decode all prompts; of those with odd numbers the first `constrained` have a grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine, schemas, tokenizer = llm.llm_engine, eight_schemas(), llm.get_tokenizer()
    held = {str(2 * i + 1): schemas[i % len(schemas)] for i in range(constrained)}
    for i, prompt in enumerate(prompts):
        schema = held.get(str(i))
        asked = None if schema is None else StructuredOutputsParams(json=schema)
        ours = {"dllm_grammar": way} if asked else {"dllm_steps": STEPS}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=OUTPUT,
            ignore_eos=asked is None,
            structured_outputs=asked,
            extra_args=ours,
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    began, tokens, last, steps_until = time.perf_counter(), 0, 0.0, 0
    steps_done, texts = 0, dict[str, str]()
    while engine.has_unfinished_requests():
        steps_done += 1
        for output in engine.step():
            if output.finished and int(output.request_id) % 2 == 0:
                tokens += len(output.outputs[0].token_ids)
                last, steps_until = time.perf_counter() - began, steps_done
            elif output.request_id in held and output.finished:
                # Not vLLM's text, which holds what stands in front if a random prompt is no UTF-8.
                ids = output.outputs[0].token_ids
                texts[output.request_id] = tokenizer.decode(
                    ids, skip_special_tokens=True
                )
    valid = [is_valid(texts[name], schema) for name, schema in held.items()]
    return {
        "grammar": way,
        "constrained": constrained,
        "valid": sum(valid),
        "free_tokens_per_s": tokens / last,
        "step_ms": 1e3 * last / steps_until,
    }


def main() -> None:
    """Print a line for each number of constrained requests, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="llada-8b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--constrained", default="0,1,8,32")
    parser.add_argument(
        "--grammar", choices=["drafts", "automaton", "both"], default="drafts"
    )
    parser.add_argument("--gpu-memory-utilization", type=float)
    args = parser.parse_args()
    grid = [int(n) for n in args.constrained.split(",")]
    ways = ["drafts", "automaton"] if args.grammar == "both" else [args.grammar]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    dllm_plugin.register()
    with tempfile.TemporaryDirectory() as scratch:
        share = args.gpu_memory_utilization
        llm = start(args.shapes, args.requests, share, Path(scratch))
        print("engine started", flush=True)
        prompts = Prompts(SHAPES[args.shapes], 0)
        rows = []
        for way in ways:
            # The largest first compiles the grammars; each number of rows may compile kernels.
            for constrained in sorted(set(grid), reverse=True):
                began = time.perf_counter()
                measure(
                    llm,
                    [prompts.take(INPUT) for _ in range(args.requests)],
                    constrained,
                    way,
                )
                seconds = time.perf_counter() - began
                print(
                    f"warmed up, {way}, {constrained} held: {seconds:.0f} s", flush=True
                )
            for constrained in grid:
                batch = [prompts.take(INPUT) for _ in range(args.requests)]
                row = measure(llm, batch, constrained, way)
                rows.append(row)
                shown = {
                    k: round(v, 2) if isinstance(v, float) else v
                    for k, v in row.items()
                }
                print(json.dumps(shown), flush=True)
        stop_engine(llm)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    line = {"benchmark": "structured_load", "shapes": args.shapes, "device": device}
    line |= {"requests": args.requests, "rows": rows}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
