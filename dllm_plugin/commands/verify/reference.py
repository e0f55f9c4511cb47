"""Choose the second implementation of a checkpoint's forward, and where it runs.

It is the checkpoint's own modelling code, if the user allows that, or our plain model.
"""

import copy
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn

from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.models.checkpoints.lora import adapter_folder
from dllm_plugin.models.checkpoints.weights import count_parameters
from dllm_plugin.reference.model import PlainModel, States
from dllm_plugin.reference.sizes import Sizes
from dllm_plugin.reference.text import Slots

ROOM = 1.2  # times the weights, for what a forward computes
FILES = ["*.safetensors", "*.safetensors.index.json", "*config.json"]
# What modelling code raises that was written for another version of transformers.
UNUSABLE = (ImportError, AttributeError, KeyError, TypeError, RuntimeError)


def _own_classes(folder: Path) -> tuple[str | None, str]:
    """Return config and model class of a checkpoint's own code, if there is some."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = config.get("auto_map") or {}
    model = named.get("AutoModelForCausalLM") or named.get("AutoModel") or ""
    return named.get("AutoConfig"), model


def has_code(folder: Path) -> bool:
    """Return whether a checkpoint's folder holds the modelling code that its config names."""
    name = _own_classes(folder)[1].partition(".")[0]
    return (folder / f"{name}.py").is_file()


def own_model(folder: Path, dtype: torch.dtype) -> Any:
    """Import a checkpoint's own code and load the weights. Raises ValueError if that fails."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    path, (config_name, model_name) = str(folder), _own_classes(folder)
    model_class: Any
    try:
        if config_name is None:
            raise KeyError("AutoConfig")
        # Not by AutoConfig, which prefers the config classes that we register.
        config_class: Any = get_class_from_dynamic_module(config_name, path)
        model_class = get_class_from_dynamic_module(model_name, path)
        config = config_class.from_pretrained(path)
        return model_class.from_pretrained(path, config=config, dtype=dtype)
    except UNUSABLE as error:
        raise ValueError(
            f"The checkpoint's own code does not run with the installed transformers ({error}):"
            " leave out --trust-remote-code."
        ) from error


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

    @torch.no_grad()
    def rows(self, tokens: list[int], block: list[int]) -> Tensor:
        """Compute logits ``[N, V]``; the query at i sees the key at j if block[i] >= block[j]."""
        device = self.model.device
        ids, given = torch.tensor([tokens], device=device), {}
        if self.always_masks or len(set(block)) > 1:
            block_N = torch.tensor(block, device=device)
            hidden = block_N[:, None] < block_N[None, :]
            least = torch.finfo(self.model.dtype).min
            mask = torch.zeros_like(hidden, dtype=self.model.dtype)
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

    def states(self, tokens: list[int], block: list[int]) -> States:
        """Compute the hidden states after the embedding and every layer, and logits."""
        with _noting(self.watched) as outputs:
            logits = self.rows(tokens, block)
        return outputs, logits

    def exact_states(self, tokens: list[int], block: list[int]) -> States:
        """Compute as `states`, in float32 by a copy of the model."""
        if self.exact is None:
            model = copy.deepcopy(self.model).float()
            layers = len(self.watched) - 1
            self.exact = OwnCode(model, self.shift, self.mask_id, layers)
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
            before, after = self.rows(tokens, block), self.rows(changed, block)
        except TypeError as error:  # of an unknown argument
            raise ValueError(
                f"The checkpoint's own code takes no attention_mask ({error}), so it cannot be "
                "compared under this strategy: leave out --trust-remote-code."
            ) from error
        same = torch.equal(before[0], after[0])
        if same is full_attention:
            faults = "ignores a mask of blocks", "attends causally without a mask"
            fault = faults[same]
            raise ValueError(
                f"The checkpoint's own code {fault}, so it cannot be compared under this "
                "strategy: leave out --trust-remote-code."
            )


@contextmanager
def _noting(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of modules, one row per position."""
    outputs: list[Tensor] = []

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden.flatten(0, -2).clone())

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class Reference(NamedTuple):
    """Store the second implementation, its name and its device."""

    model: PlainModel | OwnCode
    name: str
    device: str
    is_mixture: bool


def folder_of(model: str, with_code: bool) -> Path:
    """Return the checkpoint's folder; of a repository of the Hub, a local copy."""
    if Path(model).is_dir():
        return Path(model)
    return Path(snapshot_download(model, allow_patterns=FILES + ["*.py"] * with_code))


def load(
    folder: Path,
    config: DecodeConfig,
    dtype: torch.dtype,
    trusted: bool,
    num_layers: int,
) -> Reference:
    """Load the checkpoint's own code if it may run and there is some, else our plain model."""
    family = config.family
    own_code = trusted and has_code(folder)
    is_mixture = "num_experts" in Sizes.load(folder).raw
    # A copy in float32 tells what rounding does to the checkpoint's own code.
    copied = 4 if own_code and dtype.itemsize < 4 else 0
    device = choose_device(folder, dtype.itemsize + copied)
    if own_code:
        if config.lora_path is not None:
            raise ValueError(
                "An adapter is merged only into our plain model: leave out --trust-remote-code."
            )
        model = own_model(folder, dtype).to(device).eval()
        own = OwnCode(model, family.logits_shift, config.mask_token_id, num_layers)
        own.check(config.method.full_attention, config.method.keeps_kv)
        return Reference(own, "the checkpoint's own code", device, is_mixture)
    reading: dict[str, Any] = {"dtype": dtype, "device": device}
    if config.lora_path is not None:
        reading["adapter"] = adapter_folder(config.lora_path)
    plain = PlainModel.load(folder, config.mask_token_id, **reading)
    return Reference(plain, f"plain torch for {family.name}", device, is_mixture)


def choose_device(folder: Path, bytes_each: int) -> str:
    """Return the engine's device if the model fits there now, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    weights = count_parameters(str(folder), None)
    assert weights is not None, "the engine has loaded safetensors files"
    return "cuda" if ROOM * weights * bytes_each < free else "cpu"
