"""Run a checkpoint's own modelling code, where the user allows it, as the second implementation."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dllm_plugin.reference.text import Slots

NAMES = ("AutoModelForCausalLM", "AutoModel")


def has_code(folder: Path) -> bool:
    """Return whether a checkpoint's folder holds the modelling code that its config names."""
    reference = _class_of(folder)
    return (
        reference is not None
        and (folder / f"{reference.partition('.')[0]}.py").is_file()
    )


def _class_of(folder: Path) -> str | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = config.get("auto_map") or {}
    return next((named[name] for name in NAMES if name in named), None)


class OwnCode:
    """Compute forwards by a checkpoint's own code: token ids and a mask in, logits out."""

    def __init__(self, model: Any, shift: bool, mask_id: int, num_layers: int) -> None:
        self.model, self.shift, self.mask_id = model, shift, mask_id
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
        layers = next((m for m in lists if len(m) == num_layers), None)
        if layers is None:
            raise ValueError(
                f"The checkpoint's own code has no list of {num_layers} layers: leave out "
                "--trust-remote-code."
            )
        self.watched = [embedding, *layers]
        self.exact: OwnCode | None = None
        # Code of block-causal models may be causal without a mask, so it always gets one.
        self.always_masks = False

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        shift: bool,
        mask_id: int,
        num_layers: int,
    ) -> "OwnCode":
        """Import the code and load the weights. Raises ValueError if that does not work."""
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        # Not by AutoConfig, which prefers the config classes that we register.
        mapped = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
            "auto_map"
        ]
        config_class: Any
        model_class: Any
        try:
            config_class = get_class_from_dynamic_module(
                mapped["AutoConfig"], str(folder)
            )
            model_class = get_class_from_dynamic_module(
                str(_class_of(folder)), str(folder)
            )
            config = config_class.from_pretrained(str(folder))
            model = model_class.from_pretrained(str(folder), config=config, dtype=dtype)
        except (
            ImportError,
            AttributeError,
            KeyError,
            TypeError,
            RuntimeError,
        ) as error:
            raise ValueError(
                f"The checkpoint's own code does not run with the installed transformers ({error}):"
                " leave out --trust-remote-code."
            ) from error
        return cls(model.to(device).eval(), shift, mask_id, num_layers)

    @torch.no_grad()
    def rows(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute logits ``[N, V]``; the query at i sees the key at j if block[i] >= block[j]."""
        device = self.model.device
        ids, given = torch.tensor([tokens], device=device), {}
        if self.always_masks or len(set(block)) > 1:
            block_N = torch.tensor(block, device=device)
            hidden = block_N[:, None] < block_N[None, :]
            least = torch.finfo(self.model.dtype).min
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=device)
            given["attention_mask"] = mask.masked_fill(hidden, least)[None, None]
        logits: Tensor = self.model(input_ids=ids, **given).logits[0].float()
        return logits

    def rows_at(self, start: int, tokens: list[int], slots: Slots) -> Tensor:
        """Compute logits of the whole text, which sees itself; nothing is kept in `slots`."""
        assert start == 0, "strategies that keep KV are refused"
        return self.rows(tokens, [0] * len(tokens))

    def predictions(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute as `rows`, but row p predicts the token at position p."""
        rows = self.rows(tokens, block)
        return torch.cat([rows[:1], rows[:-1]]) if self.shift else rows

    def states(
        self, tokens: list[int], block: list[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Compute the hidden states behind the embedding and every layer, and logits."""
        with _noting(self.watched) as outputs:
            logits = self.rows(tokens, block)
        return outputs, logits

    def exact_states(
        self, tokens: list[int], block: list[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Compute as `states`, in float32 by a copy of the model."""
        if self.exact is None:
            model, num_layers = copy.deepcopy(self.model).float(), len(self.watched) - 1
            self.exact = OwnCode(model, self.shift, self.mask_id, num_layers)
            self.exact.always_masks = self.always_masks
        return self.exact.states(tokens, block)

    def check(self, full_attention: bool, keeps_kv: bool) -> None:
        """Raise ValueError unless the code computes the attention that a strategy needs."""
        if full_attention and keeps_kv:
            raise ValueError(
                "A checkpoint's own code keeps no KV as prefix_cache and dual_cache do: pass "
                "--strategy semi_autoregressive, or leave out --trust-remote-code."
            )
        self.always_masks = not full_attention
        tokens = [1, 2, 3, self.mask_id]
        block = [0, 0, 0, 0] if full_attention else [0, 0, 1, 1]
        changed = [1, 2, 3, 4]
        try:
            same = torch.equal(
                self.rows(tokens, block)[0], self.rows(changed, block)[0]
            )
        except (
            TypeError
        ) as error:  # what Python raises for an argument that there is not
            raise ValueError(
                f"The checkpoint's own code takes no attention_mask ({error}), so it cannot be "
                "compared under this strategy: leave out --trust-remote-code."
            ) from error
        if same is full_attention:
            asked = (
                "attends causally without a mask"
                if same
                else "ignores a mask of blocks"
            )
            raise ValueError(
                f"The checkpoint's own code {asked}, so it cannot be compared under this "
                "strategy: leave out --trust-remote-code."
            )


@contextmanager
def _noting(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of modules, one row per position."""
    outputs: list[Tensor] = []

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append(
            (output[0] if isinstance(output, tuple) else output).flatten(0, -2).clone()
        )

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
