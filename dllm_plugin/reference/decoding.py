"""Decode with three plain loops, the reference implementations, and score them.

They run `reference_model.forward` over a batch of problems and recompute everything in every step,
so they are slow and easy to check. Greedy throughout.
Tensor suffixes: B requests, C canvas positions, K canvas blocks, T positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dllm_plugin.reference.small_model import Shape, Weights, forward
from dllm_plugin.reference.tokenizer import EOS, EOT, MASK, chat_prompt, token_id

PADDING_BLOCK = 1 << 20  # block number of padding, which no other position sees


class Problem(Protocol):
    """State what a score asks of a problem."""

    @property
    def question(self) -> str:
        """Text that a chat asks."""

    @property
    def answer(self) -> str:
        """Text of the expected reply."""

    def is_right(self, text: str) -> bool:
        """Return whether a reply has the expected result."""


Loop = Callable[["Canvas"], tuple[Tensor, Tensor]]


@dataclass
class Canvas:
    """Hold a batch of prompts, each followed by `canvas` masks, and the model that fills them."""

    weights: Weights
    shape: Shape
    ids_BT: Tensor
    prompt_lens_B: Tensor
    canvas: int
    block: int
    mask: int
    eos: int

    def logits(self, tokens_BC: Tensor, causal: bool) -> Tensor:
        """Compute float32 logits [B, C, V] of the canvas under full or block-causal attention."""
        offset = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device)[None]
        offset = offset - self.prompt_lens_B[:, None]
        inside = (offset >= 0) & (offset < self.canvas)
        index = offset.clamp(0, self.canvas - 1)
        ids = torch.where(inside, tokens_BC.gather(1, index), self.ids_BT)
        blocks = torch.where(inside & causal, 1 + index // self.block, 0)
        blocks = blocks.masked_fill(offset >= self.canvas, PADDING_BLOCK)
        logits = forward(self.weights, self.shape, ids, blocks)
        rows = self.prompt_lens_B[:, None] + torch.arange(
            self.canvas, device=ids.device
        )
        return logits.gather(
            1, rows[..., None].expand(-1, -1, logits.shape[-1])
        ).float()

    def empty(self) -> Tensor:
        """Return a canvas of masks [B, C]."""
        return torch.full(
            (len(self.prompt_lens_B), self.canvas), self.mask, device=self.ids_BT.device
        )


def _one_token_per_step(canvas: Canvas, causal: bool) -> tuple[Tensor, Tensor]:
    """Decode block after block; each step unmasks the block's most confident position."""
    tokens = canvas.empty()
    position = torch.arange(canvas.canvas, device=tokens.device)
    for step in range(canvas.canvas):
        inside = position // canvas.block == step // canvas.block
        best, choice = canvas.logits(tokens, causal).softmax(-1).max(-1)
        best = best.masked_fill((tokens != canvas.mask) | ~inside, -1.0)
        at = best.argmax(-1, keepdim=True)
        tokens = tokens.scatter(1, at, choice.gather(1, at))
    return tokens, torch.full((len(tokens),), canvas.canvas, device=tokens.device)


def semi_autoregressive(canvas: Canvas) -> tuple[Tensor, Tensor]:
    """Run LLaDA's own loop: low confidence, steps = gen_length, full attention."""
    return _one_token_per_step(canvas, causal=False)


def block_diffusion(canvas: Canvas) -> tuple[Tensor, Tensor]:
    """Choose alike under block-causal attention, where later blocks are not seen."""
    return _one_token_per_step(canvas, causal=True)


def _is_final(tokens_BC: Tensor, canvas: Canvas) -> Tensor:
    """Return [B] bool: there is an EOS and no mask before it, so the text is final."""
    masked = (tokens_BC == canvas.mask).cumsum(-1) > 0
    return ((tokens_BC == canvas.eos) & ~masked).any(-1)


def d2f(
    canvas: Canvas, add: float = 0.1, act: float = 0.95, conf: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Decode as D2F does: at most one block opens per forward, and open blocks fill in parallel.

    Returns tokens [B, C] and forwards [B]. `add`, `act`, `conf` are the paper's tau_add, tau_act,
    tau_conf. The whole canvas is computed each time: under the block-causal mask that equals a run
    with a cache, and open blocks do not see unopened ones. A request ends, and its forwards stop
    counting, when its text is final.
    """
    tokens = canvas.empty()
    rows, device = len(tokens), tokens.device
    blocks = canvas.canvas // canvas.block
    number = torch.arange(blocks, device=device)
    opened = torch.zeros(rows, dtype=torch.long, device=device)
    full_BK = torch.zeros(rows, blocks, dtype=torch.bool, device=device)
    running = torch.ones(rows, dtype=torch.bool, device=device)
    forwards = torch.zeros(rows, dtype=torch.long, device=device)
    while running.any():
        done_BK = (tokens != canvas.mask).view(rows, blocks, -1).float().mean(-1)
        before_BK = torch.cat([torch.ones(rows, 1, device=device), done_BK[:, :-1]], 1)
        tail = before_BK.gather(1, opened.clamp(max=blocks - 1)[:, None])[:, 0]
        saw_eos = (tokens == canvas.eos).any(-1)
        opened += (opened < blocks) & ~saw_eos & (tail >= add)
        open_BK = number < opened[:, None]
        full_BK |= (before_BK >= act) & open_BK
        running &= (open_BK & (done_BK < 1)).any(-1)
        forwards += running
        logits = canvas.logits(tokens, causal=True)
        logits[..., canvas.mask] = -torch.inf
        best, choice = logits.softmax(-1).max(-1)
        usable = (tokens == canvas.mask).view(rows, blocks, -1) & open_BK[..., None]
        best = best.view(rows, blocks, -1).masked_fill(~usable, -1.0)
        take = (best > conf) & usable
        forced = torch.zeros_like(take).scatter(2, best.argmax(-1, keepdim=True), True)
        take |= forced & usable & (full_BK & ~take.any(-1))[..., None]
        take &= running[:, None, None]
        tokens = torch.where(take.view(rows, -1), choice, tokens)
        running &= ~_is_final(tokens, canvas)
    return tokens, forwards


LOOPS: dict[
    str, tuple[Loop, int, bool]
] = {  # name: loop, block length, with the adapter
    "semi_autoregressive": (semi_autoregressive, 32, False),
    "block_diffusion": (block_diffusion, 32, False),
    "d2f": (d2f, 32, True),
    "d2f_block16": (d2f, 16, True),
    "d2f_without_adapter": (d2f, 32, False),
}


def make_canvas(
    weights: Weights,
    shape: Shape,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    max_new_tokens: int,
    block: int,
    prompts: list[str] | None = None,
) -> Canvas:
    """Make one right-padded batch on the device of the weights.

    `prompts` are those of `problems` in chats; without, each is a chat's only message.
    """
    device = next(iter(weights.values())).device
    prompts = prompts or [chat_prompt(p.question) for p in problems]
    rows = [torch.tensor(e.ids, device=device) for e in tokenizer.encode_batch(prompts)]
    lengths = torch.tensor([len(r) for r in rows], device=device)
    room = torch.zeros(
        int(lengths.max()) + max_new_tokens, dtype=torch.long, device=device
    )
    ids_BT = pad_sequence([*rows, room], batch_first=True)[:-1]
    mask, eos = token_id(tokenizer, MASK), token_id(tokenizer, EOS)
    return Canvas(weights, shape, ids_BT, lengths, max_new_tokens, block, mask, eos)


@torch.no_grad()
def score(
    loop: Loop, canvas: Canvas, problems: Sequence[Problem], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Score one loop: accuracy, exact texts, and tokens (including EOS) per forward."""
    tokens_BC, forwards_B = loop(canvas)
    stops = {canvas.eos, token_id(tokenizer, EOT)}
    right = exact = generated = 0
    for row, p in zip(tokens_BC.tolist(), problems, strict=True):
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        text = tokenizer.decode(row[:end])
        right += p.is_right(text)
        exact += text == p.answer
        generated += min(end + 1, len(row))
    forwards = int(forwards_B.sum())
    return {
        "problems": len(problems),
        "accuracy": right / len(problems),
        "exact_text": exact / len(problems),
        "tokens": generated,
        "forwards": forwards,
        "tokens_per_forward": round(generated / forwards, 3),
        "block": canvas.block,
        "max_new_tokens": canvas.canvas,
    }
