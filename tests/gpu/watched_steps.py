"""Run as a script by tests of watched steps: report waits and compilations in steps of an engine.

Arguments: a family, and the engine's options as JSON. The last line is JSON: kind of request ->
where the host waited for the device, and the kernels that were compiled. Raises if a step compiled
anew what torch had compiled.
"""

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import recorded
from engines import a_prompt, params

SLOW = {
    "dllm_threshold": 1.0
}  # one token per forward: requests run on while others come
WARM = {"temperature": 0.7, "seed": 3}
WORDS = {"bad_words": ["ab", "c"]}
KINDS = {
    "plain": [SLOW, SLOW | WARM, SLOW | {"temperature": 1.0}],
    "filtered": [
        SLOW | {"temperature": 0.8, "top_p": 0.9},
        SLOW | {"temperature": 0.8, "top_k": 5},
        SLOW | {"temperature": 0.8, "min_p": 0.1},
        SLOW | {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    ],
    "ruled": [
        SLOW | {"logit_bias": {70: 3.0}},
        SLOW | {"allowed_token_ids": list(range(64, 90))},
        SLOW | {"min_tokens": 20, "stop_token_ids": [7], "ignore_eos": False},
        {"dllm_policy": "entropy"},
        {"dllm_policy": "entropy", "logit_bias": {70: 3.0}} | WARM,
    ],
    "penalised": [
        SLOW | {"repetition_penalty": 1.2},
        SLOW | {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        SLOW | {"frequency_penalty": 0.5} | WARM,
    ],
    "kept": [
        SLOW | {"logprobs": 2},
        SLOW | WORDS,
        SLOW | WARM | {"logprobs": 0},
        SLOW | WORDS | WARM,
    ],
    "ranked": [
        {"dllm_policy": "entropy", "logprobs": 1},
        {"dllm_policy": "entropy", "logprobs": 1} | WARM,
        {"dllm_policy": "topk_margin", "temperature": 0.8, "top_p": 0.9},
        SLOW,
        SLOW | WARM,
    ],
    "streamed": [SLOW | {"dllm_frames": 1}, SLOW | {"dllm_trace": 1}],
}
# Those with a grammar: by automata, or by drafts.
HELD = [
    SLOW,
    SLOW | WARM,
    {"dllm_policy": "entropy"},
    SLOW | {"logit_bias": {70: 3.0}} | WARM,
]
HELD += [SLOW | {"logprobs": 1}, SLOW | {"repetition_penalty": 1.2}]
GRAMMARS = {"held": "automaton", "checked": "drafts"}
TOKENS, STEPS = 120, 20
WAITS = ("called a synchronizing CUDA operation", "Implicit GPU<->CPU sync")


def control() -> None:
    """A wait, and a kernel in a form that nobody asks for, which have to be found."""
    from vllm.utils.gpu_sync_debug import with_gpu_sync_check

    from dllm_plugin.kernels.move_rows import move_rows

    with_gpu_sync_check(lambda: torch.ones(1, device="cuda").item())()
    nothing = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows = torch.zeros(1, 16, device="cuda")
    move_rows(
        rows.to(torch.float16), nothing, rows.to(torch.float64), nothing, nothing > 0
    )


def wish_of(kind, wish):
    """Parameters of a request of a kind."""
    if kind not in GRAMMARS:
        return params(TOKENS, **wish)
    from vllm.sampling_params import StructuredOutputsParams

    asked = StructuredOutputsParams(regex="[a-z ]{90,}")
    held = {
        "dllm_grammar": GRAMMARS[kind],
        "ignore_eos": False,
        "structured_outputs": asked,
    }
    return params(TOKENS, **wish | held)


def note_kernels(note) -> None:
    """Have each Triton kernel of ours noted that is compiled, or read from disk, from now on.

    Those of vLLM's are its own: it leaves top-k, top-p and attention to the first request.
    """
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def hook(**compiled):
        kernel = compiled["fn"]
        if kernel.module.startswith("dllm_plugin."):
            note(kernel.name)
        return None if before is None else before(**compiled)

    knobs.runtime.jit_post_compile_hook = hook


def main(family, options) -> None:
    """Requests of each kind, one of them after the others; then what has to be found."""
    but = options.pop("but", ())
    every = KINDS | dict.fromkeys(GRAMMARS, HELD)
    kinds = {kind: wishes for kind, wishes in every.items() if kind not in but}
    found = {kind: [] for kind in [*kinds, "control"]}
    current = next(iter(kinds))

    def note(message, category, filename, lineno, file=None, line=None):
        if any(words in str(message) for words in WAITS):
            found[current].append(f"{filename}:{lineno}")

    warnings.showwarning = note
    llm = recorded.start(f"checkpoints/tiny-{family}", options.pop("dllm"), **options)
    note_kernels(lambda kernel: found[current].append(f"compiled {kernel}"))
    engine = llm.llm_engine
    with torch._dynamo.config.patch(error_on_recompile=True):
        for current, wishes in kinds.items():  # noqa: B007, which `note` reads
            for i, wish in enumerate([*wishes, wishes[0]]):
                prompt = {"prompt_token_ids": a_prompt(20 + 9 * i, i)}
                engine.add_request(f"{current}-{i}", prompt, wish_of(current, wish))
                for _ in range(STEPS if i >= len(wishes) - 1 else 1):
                    engine.step()
            assert engine.get_num_unfinished_requests() > 1, current
            while engine.has_unfinished_requests():
                engine.step()
    current = "control"
    control()
    engine.engine_core.shutdown()
    print(json.dumps({kind: sorted(set(places)) for kind, places in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
