"""What one request's parameters cost its neighbours: 32 greedy requests beside one of each kind.

    python benchmarks/neighbours.py
    python benchmarks/neighbours.py --vocab 126464 --canvas 8

With ``--vocab`` the model is a tiny one with so many tokens and random weights, else the bundled
one. Runs on the machine's own device in one process. The neighbours' tokens are compared with those
they have alone before a number is printed; a step's time is the median CPU time of the process, so
that other work on the machine does not count.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from dllm_plugin import default_model

NEIGHBOURS, TOKENS = 32, 24
TINY = Path(__file__).parents[1] / "tests" / "goldens" / "checkpoints" / "tiny-llada"
# 20 log-probabilities are the most that an engine gives by default. EOS switches, dllm_top_p and
# dllm_top_k are refused under d2f, whose steps read none of them.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_p": {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "seed": 1, "top_k": 20},
    "min_p": {"temperature": 0.8, "seed": 1, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "logprobs 20": {"logprobs": 20},
    "bad_words": {
        "bad_words": [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
    },
    "logit_bias": {"logit_bias": {i: 0.5 for i in range(10, 300)}},
    "allowed_token_ids": {"allowed_token_ids": list(range(10, 250))},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": list(range(128)), "min_tokens": TOKENS},
    "own policy": {"dllm_policy": "entropy"},
    "own block_length": {"dllm_block_length": 4},
}


def real_sized(folder: Path, vocab_size: int) -> str:
    """Write a tiny checkpoint with a vocabulary of this size; return its folder."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in TINY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((TINY / "config.json").read_text())
    config |= {"vocab_size": vocab_size, "embedding_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, generator = (
        load_file(TINY / "model.safetensors"),
        torch.Generator().manual_seed(0),
    )
    for name, tensor in tensors.items():
        if name.endswith(("wte.weight", "transformer.ff_out.weight")):
            more = vocab_size - len(tensor), tensor.shape[1]
            noise = torch.randn(more, generator=generator) * tensor.float().std()
            tensors[name] = torch.cat([tensor, noise.to(tensor.dtype)])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def wish(kind: dict[str, Any]) -> Any:
    """Parameters of a request that decodes a token a forward."""
    from vllm import SamplingParams

    given = {"temperature": 0.0, "ignore_eos": True} | kind
    extra = {"dllm_threshold": 1.0} | {
        k: given.pop(k) for k in list(given) if k[:5] == "dllm_"
    }
    return SamplingParams(max_tokens=TOKENS, extra_args=extra, **given)


def decode(
    llm: Any, kind: dict[str, Any] | None
) -> tuple[list[list[int]], list[float]]:
    """Return the neighbours' tokens, and seconds of each step in which all requests decode."""
    engine = llm.llm_engine
    kinds = [{}] * NEIGHBOURS + ([] if kind is None else [kind])
    for i, own in enumerate(kinds):
        prompt = {"prompt_token_ids": [40 + (7 * i + j * j) % 80 for j in range(8)]}
        engine.add_request(str(i), prompt, wish(own))
    tokens: dict[int, list[int]] = {}
    seconds: list[float] = []
    while engine.has_unfinished_requests():
        began = time.process_time()
        ended = [output for output in engine.step() if output.finished]
        seconds.append(time.process_time() - began)
        tokens |= {int(o.request_id): list(o.outputs[0].token_ids) for o in ended}
    # The prompts come first; what needs more forwards than the others runs alone at the end.
    return [tokens[i] for i in range(NEIGHBOURS)], seconds[2 : TOKENS - 2]


def measure(llm: Any, repeats: int) -> list[dict[str, Any]]:
    """Return rows of the table; every kind is measured next to the neighbours alone."""
    alone, _ = decode(llm, None)
    rows = []
    for name, kind in KINDS.items():
        decode(llm, kind)  # makes tables
        before: list[float] = []
        beside: list[float] = []
        for _ in range(repeats):
            before += decode(llm, None)[1]
            tokens, seconds = decode(llm, kind)
            assert tokens == alone, f"{name} changes its neighbours' tokens"
            beside += seconds
        times = 1e3 * median(before), 1e3 * median(beside)
        rows.append({"kind": name, "alone_ms": times[0], "beside_ms": times[1]})
        print(
            f"{name:<20}{times[0]:>10.2f}{times[1]:>10.2f}{times[1] / times[0]:>10.2f}"
        )
    return rows


def main() -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--vocab", type=int, help="size of the vocabulary of a tiny model"
    )
    parser.add_argument("--canvas", type=int, default=32, help="positions of a canvas")
    parser.add_argument(
        "--repeats", type=int, default=2, help="how often each kind is decoded"
    )
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    dllm = {"strategy": "d2f", "canvas_length": arguments.canvas, "block_length": 8}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.vocab:
            model = real_sized(Path(folder), arguments.vocab)
        else:
            model = default_model.path()
            dllm["lora_path"] = default_model.adapter_path()
        llm = LLM(
            model=model,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=64,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            additional_config={"dllm": dllm},
        )
        print(f"{'beside one with':<20}{'alone ms':>10}{'beside ms':>10}{'times':>10}")
        rows = measure(llm, arguments.repeats)
        llm.llm_engine.engine_core.shutdown()
    about = {
        "benchmark": "neighbours",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    about |= {"vocab": arguments.vocab or "bundled", "canvas": arguments.canvas}
    print(json.dumps(about | {"rows": rows}))


if __name__ == "__main__":
    main()
