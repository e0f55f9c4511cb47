"""Decode prompts by the engine, one at a time, and note what each forward decided."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dllm_plugin.commands.offline import num_forwards, start_engine
from dllm_plugin.commands.verify.worker import EXTENSION, Seen, call
from dllm_plugin.config.decode import DecodeConfig, get_decode_config
from dllm_plugin.config.options import REQUEST_PREFIX
from dllm_plugin.config.request.parsing import request_arguments

if TYPE_CHECKING:
    from vllm import LLM

COMPARED = 64  # most positions on each side of the prompt's end whose hidden states are compared
SEED = 0


class Decided(NamedTuple):
    """Hold what one forward of the engine decided, and what it would have proposed elsewhere."""

    new: dict[int, int]  # position -> token
    best: dict[int, tuple[int, float]]  # position -> proposal and its confidence


@dataclass
class Decode:
    """Hold one prompt and what the engine made of it."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    forwards: int
    decided: list[Decided]  # of forwards that decided anything
    first: Seen


def start(options: dict[str, Any], tensor_parallel_size: int) -> "LLM":
    """Start an engine whose model can be watched. Raises ValueError if it does not start."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when the engine is built
    dllm = dict(options["additional_config"]["dllm"]) | {"commit_alone_from": 0}
    return start_engine(
        options
        | {
            "additional_config": {"dllm": dllm},
            "tensor_parallel_size": tensor_parallel_size,
            "worker_extension_cls": EXTENSION,
            "max_num_seqs": 1,
            # Hooks see neither graphs nor compiled layers; a step is looked at before the next one
            # begins; and every prompt is computed whole.
            "enforce_eager": True,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "use_tqdm_on_load": False,  # the command has a bar of its own
        }
    )


def config_of(llm: "LLM") -> DecodeConfig:
    """Return what the engine decodes with."""
    return get_decode_config(llm.llm_engine.vllm_config)


def decode(
    llm: "LLM", name: str, prompt: list[int], max_tokens: int, stop: set[int]
) -> Decode:
    """Decode one prompt greedily, step by step."""
    from vllm import RequestOutput, SamplingParams

    config, length = config_of(llm), len(prompt)
    shift = int(config.family.logits_shift)
    call(
        *(llm, "watch_request", max(length - COMPARED, 0), max(length - shift, 0)),
        *(length + COMPARED, config.mask_token_id),
    )
    named = None
    if config.draft_rows:
        # Drafts of a length that is asked for do not depend on load.
        named = {REQUEST_PREFIX + "block_length": config.block_length}
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        seed=SEED,
        # The second implementation is told the same tokens.
        ignore_eos=True,
        stop_token_ids=sorted(stop),
        extra_args=named,
    )
    engine = llm.llm_engine
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    known, decided, output = dict(enumerate(prompt)), [], None
    template = request_arguments(config, {}, max_tokens).template
    if template is not None:  # no forward decides what is given
        known |= dict(enumerate(template.token_ids, length))
    while engine.has_unfinished_requests():
        for found in engine.step():
            assert isinstance(found, RequestOutput)
            output = found
        start, canvas, best = call(llm, "canvas_seen")
        if config.method.verifies:
            canvas = canvas[:1]  # after it stand drafts
        text = {
            start + i: token
            for i, token in enumerate(canvas)
            if token != config.mask_token_id
        }
        if output is not None:
            # A block that was decided and committed in this step has left the canvas.
            text |= dict(enumerate(output.outputs[0].token_ids, length))
        new = {
            p: token
            for p, token in text.items()
            if known.get(p) != token and p >= length
        }
        known |= new
        if new:
            decided.append(Decided(new, {p + shift: one for p, one in best.items()}))
    assert output is not None, "every request that ends has an output"
    first = call(llm, "first_forward")
    call(llm, "stop_watching")
    tokens = list(output.outputs[0].token_ids)
    return Decode(prompt, max_tokens, tokens, num_forwards(output), decided, first)
