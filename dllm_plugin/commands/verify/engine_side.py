"""Decode prompts by the engine, one at a time, and record what each forward decided.

The engine's model is watched by vLLM's `worker_extension_cls`. The hooks are methods of every rank,
because gathering logits takes all of them; only rank 0 returns what they found. They need a model
that runs eagerly, layer by layer.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import tensor_model_parallel_all_gather

from dllm_plugin.commands.offline import num_forwards, start_engine
from dllm_plugin.config.options import FILL, REQUEST_PREFIX

from .second_opinion import Job

# Most positions on each side of the prompt's end whose hidden states are compared.
COMPARED = 64
SEED = 0
ROWS = 64  # logits rows that are computed at a time


@dataclass
class Seen:
    """Store what a rank has seen of a request, by position.

    span       positions whose hidden states and logits in the first forward are kept
    best_from  first row of which each forward's token and confidence are kept
    first      whether the first forward is not over
    ids        tokens of the first forward, the prompt's included
    states     hidden state after the embedding and each layer
    logits     raw logits rows of the first forward
    best       row -> most probable token but the mask, and its probability
    """

    span: range
    best_from: int
    mask_id: int
    first: bool = True
    states: list[dict[int, Tensor]] = field(default_factory=list)
    ids: dict[int, int] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    best: dict[int, tuple[int, float]] = field(default_factory=dict)


class VerifyWorker:
    """Extend the worker of every rank; its own methods have other names."""

    seen: Seen | None = None
    hooked: bool = False
    layer_outputs: list[Tensor]
    slot: int = 0

    def watch_request(self, span: range, best_from: int, mask_id: int) -> None:
        """Forget the last request and watch the next request."""
        self.seen, self.layer_outputs = Seen(span, best_from, mask_id), []
        if not self.hooked:
            worker: Any = self
            model = worker.get_model()
            model.register_forward_hook(self._note_forward, with_kwargs=True)
            inner, name = model.model, "embed_tokens"
            if "word_embeddings" in dict(inner.named_children()):
                name = "word_embeddings"
            for layer in [inner.get_submodule(name), *inner.layers]:
                layer.register_forward_hook(self._note_layer)
            self.hooked = True

    def canvas_seen(self) -> tuple[int, list[int], dict[int, tuple[int, float]]] | None:
        """Return start and tokens of the canvas, and the latest proposal of each row."""
        worker: Any = self
        states = worker.model_runner.model_state.states
        if worker.rank or self.seen is None:
            return None
        slots = list(states.req_id_to_slot.values())
        # Its row stays when the request has ended.
        self.slot = slots[0] if slots else self.slot
        start = int(states.start_N[self.slot])
        row = states.canvas_NC[self.slot].tolist()
        return start, row, dict(self.seen.best)

    def stop_watching(self) -> Seen | None:
        """Return what was seen of the first forward, on the CPU; hooks then do nothing."""
        worker: Any = self
        seen, self.seen = self.seen, None
        return None if worker.rank else seen

    def _note_layer(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        if self.seen is not None and self.seen.first:
            # vLLM's layers hand on the residual apart, and write into it later.
            parts = output if isinstance(output, tuple) else (output, 0)
            self.layer_outputs.append(parts[0] + parts[1])

    def _note_forward(
        self, model: Any, arguments: Any, given: Any, hidden: Tensor
    ) -> None:
        outputs, self.layer_outputs = self.layer_outputs, []
        if self.seen is None:
            return
        seen, positions = self.seen, given["positions"].tolist()
        if seen.first:
            ids = given["input_ids"].tolist()
            seen.ids |= dict(zip(positions, ids, strict=True))
            kept = [i for i, p in enumerate(positions) if p in seen.span]
            places = [positions[i] for i in kept]
            if not seen.states:
                seen.states = [{} for _ in outputs]
            for found, output in zip(seen.states, outputs, strict=True):
                found |= dict(zip(places, output[kept].cpu(), strict=True))
            for i, row in self._logits(model, hidden, kept):
                seen.logits[positions[i]] = row.cpu()
            # The prompt may be computed by itself, in pieces: then its forwards are part of this.
            seen.first = seen.mask_id not in ids
        asked = [i for i, p in enumerate(positions) if p >= seen.best_from]
        for i, row in self._logits(model, hidden, asked):
            row[seen.mask_id] = float("-inf")
            probability, token = row.softmax(-1).max(-1)
            seen.best[positions[i]] = (int(token), float(probability))

    def _logits(
        self, model: Any, hidden: Tensor, rows: list[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Compute whole float32 logits rows, the same on every rank."""
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            logits = model.compute_logits(hidden[some])
            if model.keeps_columns:
                logits = tensor_model_parallel_all_gather(logits)
                logits = logits[:, : model.config.vocab_size]
            if logits is not None:
                yield from zip(some, logits.float(), strict=True)


EXTENSION = f"{__name__}.{VerifyWorker.__name__}"


def call(llm: LLM, method: str, *arguments: Any) -> Any:
    """Call a method on all ranks; return rank 0's result."""
    return llm.collective_rpc(method, args=arguments)[0]


class Decided(NamedTuple):
    """Store what one forward of the engine decided, and what it proposed elsewhere."""

    new: dict[int, int]  # position -> token
    best: dict[int, tuple[int, float]]  # position -> proposal and its confidence


@dataclass
class Decode:
    """Store a prompt and its decode by the engine."""

    prompt: list[int]
    tokens: list[int]
    forwards: int
    decided: list[Decided]  # of forwards that decided anything
    first: Seen


def start(options: dict[str, Any], tensor_parallel_size: int) -> LLM:
    """Start an engine whose model can be watched. Raises ValueError if it does not start."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when the engine is built
    dllm = options["additional_config"]["dllm"] | {"commit_alone_from": 0}
    own = {
        "additional_config": {"dllm": dllm},
        "tensor_parallel_size": tensor_parallel_size,
        "worker_extension_cls": EXTENSION,
        "max_num_seqs": 1,
        # Hooks see neither graphs nor compiled layers; a step is looked at before the next step
        # begins; and every prompt is computed whole.
        "enforce_eager": True,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,  # the command has a bar of its own
    }
    return start_engine(options | own)


def decode(llm: LLM, name: str, job: Job) -> Decode:
    """Decode one prompt greedily, step by step."""
    config = job.config
    prompt = job.prompt
    length = len(job.prompt)
    shift = int(config.family.logits_shift)
    span = range(max(length - COMPARED, 0), length + COMPARED)
    first_row = max(length - shift, 0)
    call(llm, "watch_request", span, first_row, config.mask_token_id)
    named = None
    if config.draft_rows:
        # Drafts of a length that is asked for do not depend on load.
        named = {REQUEST_PREFIX + "block_length": config.block_length}
    sampling = SamplingParams(
        max_tokens=job.max_tokens,
        temperature=0.0,
        seed=SEED,
        # The second implementation is told the same tokens.
        ignore_eos=True,
        stop_token_ids=sorted(job.stop),
        extra_args=named,
    )
    engine = llm.llm_engine
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    known, decided, output = dict(enumerate(prompt)), [], None
    template = job.request.template
    if template is not None:  # no forward decides what is given
        for position, token in enumerate(template.token_ids, length):
            if token != FILL:
                known[position] = token
    while engine.has_unfinished_requests():
        for found in engine.step():
            assert isinstance(found, RequestOutput)
            output = found
        start, canvas, best = call(llm, "canvas_seen")
        if config.method.verifies:
            canvas = canvas[:1]  # after it stand drafts
        text = {}
        for position, token in enumerate(canvas, start):
            # A deletion may bring a mask to where a token was.
            if token != config.mask_token_id or position in known:
                text[position] = token
        if output is not None:
            # A block that was decided and committed in this step has left the canvas.
            text |= dict(enumerate(output.outputs[0].token_ids, length))
        new = {}
        for p, token in text.items():
            if known.get(p) != token and p >= length:
                new[p] = token
        known |= new
        if new:
            proposed = {p + shift: one for p, one in best.items()}
            decided.append(Decided(new, proposed))
    assert output is not None, "every request that ends has an output"
    first = call(llm, "stop_watching")
    tokens = list(output.outputs[0].token_ids)
    return Decode(prompt, tokens, num_forwards(output), decided, first)
