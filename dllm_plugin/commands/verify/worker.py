"""Watch what the engine's model computes and decides, by vLLM's `worker_extension_cls`.

The hooks are methods of every rank, because gathering logits takes all of them; what they found is
returned by rank 0 alone. They need a model that runs eagerly, layer by layer.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm import LLM

ROWS = 64  # logits rows that are computed at a time


class Watching(NamedTuple):
    """Say of which request's positions what is kept.

    states  hidden states and logits of the first forward, of positions from here on
    best    token and confidence of each forward, of rows from here on
    stop    no hidden states from here on
    """

    states: int
    best: int
    stop: int
    mask_id: int


class Seen:
    """Hold what a rank has seen of a request, by position.

    ids     tokens of the first forward, the prompt's included
    states  hidden state behind the embedding and each layer
    logits  raw logits rows of the first forward
    best    row -> most probable token but the mask, and its probability
    """

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.first = True
        self.states: list[dict[int, Tensor]] = []
        self.ids: dict[int, int] = {}
        self.logits: dict[int, Tensor] = {}
        self.best: dict[int, tuple[int, float]] = {}


class VerifyWorker:
    """Extend the worker of every rank; its own methods have other names."""

    seen: Seen | None = None
    hooked: bool = False
    layer_outputs: list[Tensor]

    def watch_request(self, states: int, best: int, stop: int, mask_id: int) -> None:
        """Forget the last request and watch the next one."""
        self.seen, self.layer_outputs = Seen(Watching(states, best, stop, mask_id)), []
        if not self.hooked:
            model: Any = self._model()
            model.register_forward_hook(self._note_forward, with_kwargs=True)
            for layer in embedding_and_layers(model):
                layer.register_forward_hook(self._note_layer)
            self.hooked = True

    def stop_watching(self) -> None:
        """Look away; hooks then return at once."""
        self.seen, self.layer_outputs = None, []

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

    slot: int = 0

    def first_forward(self) -> Seen | None:
        """Return what was seen of the first forward, on the CPU."""
        worker: Any = self
        return None if worker.rank else self.seen

    def _model(self) -> nn.Module:
        worker: Any = self
        model: nn.Module = worker.get_model()
        return model

    def _note_layer(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        if self.seen is not None and self.seen.first:
            # vLLM's layers hand on the residual apart, and write into it later.
            total = (
                output[0] + output[1] if isinstance(output, tuple) else output.clone()
            )
            self.layer_outputs.append(total)

    def _note_forward(
        self, model: Any, arguments: Any, given: Any, hidden: Tensor
    ) -> None:
        outputs, self.layer_outputs = self.layer_outputs, []
        if self.seen is None:
            return
        watching, positions = self.seen.watching, given["positions"].tolist()
        if self.seen.first:
            ids = given["input_ids"].tolist()
            self.seen.ids |= dict(zip(positions, ids, strict=True))
            kept = [
                i
                for i, p in enumerate(positions)
                if watching.states <= p < watching.stop
            ]
            if not self.seen.states:
                self.seen.states = [{} for _ in outputs]
            for found, output in zip(self.seen.states, outputs, strict=True):
                rows = output[kept].cpu()
                found |= {positions[i]: row for i, row in zip(kept, rows, strict=True)}
            for i, row in self._logits(model, hidden, kept):
                self.seen.logits[positions[i]] = row.cpu()
            # The prompt may be computed by itself, in pieces: then its forwards are part of this.
            self.seen.first = watching.mask_id not in ids
        asked = [i for i, p in enumerate(positions) if p >= watching.best]
        for i, row in self._logits(model, hidden, asked):
            row[watching.mask_id] = float("-inf")
            probability, token = row.softmax(-1).max(-1)
            self.seen.best[positions[i]] = (int(token), float(probability))

    def _logits(
        self, model: Any, hidden: Tensor, rows: list[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Compute whole float32 logits rows, the same on every rank."""
        from vllm.distributed import tensor_model_parallel_all_gather

        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            logits = model.compute_logits(hidden[some])
            if model.keeps_columns:
                logits = tensor_model_parallel_all_gather(logits)[
                    :, : model.config.vocab_size
                ]
            if logits is not None:
                yield from zip(some, logits.float(), strict=True)


def embedding_and_layers(model: Any) -> list[nn.Module]:
    """Return the modules whose outputs are the hidden states, in order."""
    inner = model.model
    name = (
        "word_embeddings"
        if "word_embeddings" in dict(inner.named_children())
        else "embed_tokens"
    )
    return [inner.get_submodule(name), *inner.layers]


EXTENSION = f"{__name__}.{VerifyWorker.__name__}"


def call(llm: "LLM", method: str, *arguments: Any) -> Any:
    """Call a method on all ranks; return rank 0's result."""
    return llm.collective_rpc(method, args=arguments)[0]
