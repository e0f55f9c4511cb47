"""Run ``diffuplug verify``: does the engine decode a checkpoint as a second implementation does?"""

import argparse
import os
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from vllm import LLM
from vllm.config import ModelConfig

from dllm_plugin.commands.offline import prompt_of, stop_engine
from dllm_plugin.config.decode import DecodeConfig, get_decode_config
from dllm_plugin.decoding.families import FAMILIES

from . import compare, engine_side, second_opinion
from .compare import Verdict, Watcher, compare_first_forward
from .engine_side import Decode
from .reference import Reference, folder_of, load
from .second_opinion import Job

MAX_TOKENS = 128


class EngineSide(NamedTuple):
    """Store what is left of an engine that has ended."""

    config: DecodeConfig
    dtype: torch.dtype
    jobs: list[Job]
    decodes: list[Decode]
    spell: compare.Spell


def run(args: argparse.Namespace, options: dict[str, Any], texts: list[str]) -> int:
    """Print a line per prompt and one JSON line; 0 when both sides agree everywhere, else 1."""
    # Triton's default for float32 GEMMs is tf32, which is no rounding of float32.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    folder = folder_of(options["model"], args.trust_remote_code)
    # Shown from the first decode on: what vLLM logs while it starts has lines of its own.
    with tqdm(desc="engine", total=2 * len(texts), unit="decode", delay=1e-3) as bar:
        side = _decode_by_engine(options, args.tensor_parallel_size, texts, bar)
        bar.set_description("reference")
        # The engine's memory is the second implementation's now.
        num_layers = len(side.decodes[0].first.states) - 1
        trusted = args.trust_remote_code
        reference = load(folder, side.config, side.dtype, trusted, num_layers)
        bar.clear()
        name = args.model or "the bundled model"
        print(f"{name}: {side.config.strategy}, policy {side.config.policy}")
        place = f"{reference.name} on {reference.device}, {side.dtype}"
        print(f"engine against {place}\n", flush=True)
        verdicts = []
        pairs = zip(side.jobs, side.decodes, strict=True)
        for number, (job, found) in enumerate(pairs, 1):
            verdicts.append(_compare(reference, job, found, side.dtype))
            bar.clear()
            compare.print_prompt(number, verdicts[-1], side.spell)
            bar.update()
    machine = {
        "dtype": str(side.dtype).removeprefix("torch."),
        "tensor_parallel_size": args.tensor_parallel_size,
        "reference": reference.name,
        "reference_device": reference.device,
    }
    print(f"\n{compare.summary(verdicts)}")
    served = args.model or "bundled"
    print(compare.json_line(served, side.config, machine, verdicts))
    return 0 if all(verdict.agrees for verdict in verdicts) else 1


def _decode_by_engine(
    options: dict[str, Any], ranks: int, texts: list[str], bar: "tqdm[Any]"
) -> EngineSide:
    """Decode all prompts by an engine that has ended when this returns."""
    llm = engine_side.start(options, ranks)
    try:
        model_config = llm.llm_engine.model_config
        if model_config.architecture not in FAMILIES:
            raise ValueError(f"{model_config.architecture} is not served by DiffuPlug")
        config = get_decode_config(llm.llm_engine.vllm_config)
        second_opinion.check(config)
        jobs, decodes = [_job(llm, config, text) for text in texts], []
        for i, job in enumerate(jobs):
            decodes.append(engine_side.decode(llm, str(i), job))
            bar.update()
        dtype: torch.dtype = model_config.dtype  # type: ignore[assignment]
        return EngineSide(config, dtype, jobs, decodes, llm.get_tokenizer().decode)
    finally:
        stop_engine(llm)


def _job(llm: LLM, config: DecodeConfig, text: str) -> Job:
    tokenizer: Any = llm.get_tokenizer()
    prompt = prompt_of(tokenizer, text)
    model_config = llm.llm_engine.model_config
    room = model_config.max_model_len - len(prompt)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of "
            f"{model_config.max_model_len}: {text[:40]!r}"
        )
    stops = _ends(model_config, tokenizer) | set(config.turn_end_token_ids)
    if config.hidden_token_id is not None:
        stops.add(config.hidden_token_id)
    limit = model_config.max_model_len
    return Job(prompt, min(MAX_TOKENS, room), config, stops, limit)


def _ends(model_config: ModelConfig, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer."""
    ends = {tokenizer.eos_token_id}
    generation = model_config.try_get_generation_config().get("eos_token_id")
    ends |= set(generation) if isinstance(generation, list) else {generation}
    return ends - {None}


def _compare(
    reference: Reference, job: Job, theirs: Decode, dtype: torch.dtype
) -> Verdict:
    first, model = theirs.first, reference.model
    stop = min(second_opinion.first_stop(job), max(first.ids) + 1)
    blocks = second_opinion.blocks_of(job, stop)
    text = [first.ids[p] for p in range(stop)], blocks
    ours = model.states(*text)
    exact = ours if dtype.itemsize == 4 else model.exact_states(*text)
    seen = (first.states, first.logits)
    compared = compare_first_forward(seen, ours, exact, stop, reference.is_mixture)
    end = len(job.prompt) + len(theirs.tokens)
    mask_id = job.config.mask_token_id
    moves = compared.rounding
    by_entropy = job.config.policy == "entropy"
    watcher = Watcher(theirs.decided, end, mask_id, moves, by_entropy)
    result = second_opinion.decode_job(model, job, watcher)
    return Verdict(theirs, result, compared, watcher.difference)
