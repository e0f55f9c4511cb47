"""Refuse checkpoints that would load as a family of ours and print wrong text.

Also find keys of a config.json that nothing here reads. Imports neither torch nor vLLM: commands
call this before they import either.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from .trained_for import checkpoint_names, model_names, tokenizer_ids

if TYPE_CHECKING:
    from vllm.config import ModelConfig

ADAPTER_CONFIG = "adapter_config.json"
MODELS = "docs/support.md lists the models that DiffuPlug serves"


def _is_set(value: Any) -> bool:
    return value is not None


def _is_one(value: Any) -> bool:
    return type(value) is int and value == 1


@dataclass(frozen=True)
class Unserved:
    """Describe one kind of checkpoint that is refused.

    title        as its authors write it
    model_types  of config.json
    why          what it does that DiffuPlug does not
    instead      what the user can do
    keys         of config.json or generation_config.json, with the values that show the kind
    name         pattern of the checkpoint's own name, in lower case
    token        of its tokenizer
    adapter      folder beside config.json that has one
    served       architecture of such checkpoints that are served
    """

    title: str
    model_types: tuple[str, ...]
    why: str
    instead: str
    keys: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    name: str | None = None
    token: str | None = None
    adapter: str | None = None
    served: str | None = None

    def sign(
        self,
        config: Mapping[str, Any],
        names: Collection[str],
        tokens: Collection[str],
        folder: Path | None,
    ) -> str | None:
        """Return what shows that a checkpoint is of this kind; None if nothing does."""
        if config.get("model_type") not in self.model_types:
            return None
        if self.served in (config.get("architectures") or ()):
            return None
        for key, shows in self.keys.items():
            if shows(config.get(key)):
                return f"{key}={config[key]!r} in its configuration"
        for name in sorted(names):
            if self.name is not None and re.search(self.name, name):
                return f"by the name {name!r}: rename what is none"
        if self.token in tokens:
            return f"{self.token!r} in its tokenizer"
        if self.adapter is None or folder is None:
            return None
        if (folder / self.adapter / ADAPTER_CONFIG).is_file():
            return f"adapter in {self.adapter!r}: move the folder of what is none"
        return None


SDAR_TYPES = ("sdar", "sdar_moe")
IDLM, WEDLM_BIASED = "IDLMForCausalLM", "WeDLMBiasedForCausalLM"
CAUSAL = "attends causally, and with the block attention of SDAR it writes garbage"
UNSERVED = (
    Unserved(
        title="UNO",
        model_types=SDAR_TYPES,
        why=CAUSAL,
        instead="take vLLM's own speculative decoding for it (vLLM pull request 55947)",
        name=r"(^|[-_/])uno([-_/]|$)",
        adapter="adapter",  # it drafts
    ),
    Unserved(
        title="I-DLM",
        model_types=SDAR_TYPES,
        why=CAUSAL,
        instead="write block_size 1 into config.json if its model_type is sdar",
        keys={"use_regular_causal": bool, "block_size": _is_one},
        served=IDLM,
        name=r"(^|[-_/])i-?dlm",
    ),
    Unserved(
        title="DreamOn",
        model_types=("Dream",),
        why="lengthens and shortens its text by tokens that would be printed here",
        instead="take Dream-Coder with /v1/infill, which tries several lengths",
        keys={"expand_token_id": _is_set, "delete_token_id": _is_set},
        name=r"(^|[-_/])dreamon([-_.]|$)",
        token="<|expand|>",
    ),
)


def _is_causal(config: Mapping[str, Any]) -> bool:
    return _is_one(config.get("block_size")) or bool(config.get("use_regular_causal"))


def _has_no_norms(config: Mapping[str, Any]) -> bool:
    return config.get("qk_norm") is False


def _shares_experts(config: Mapping[str, Any]) -> bool:
    return bool(config.get("expert_capacity"))


LLADA22 = ("LLaDA22MoeModelLM", _shares_experts)
# Kinds of a model type that need a class of their own: I-DLM is published as SDAR.
KINDS: dict[Any, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "sdar": (IDLM, _is_causal),
    "wedlm": (WEDLM_BIASED, _has_no_norms),
    "llada2_moe": LLADA22,
    "llada2_moe_veomni": LLADA22,
}


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json in which kinds of a model type have architectures of their own."""
    found = dict(config)
    architecture, is_kind = KINDS.get(found.get("model_type"), ("", _has_no_norms))
    if architecture and is_kind(found):
        found["architectures"] = [architecture]
    if architecture and _has_no_norms(found):
        # vLLM's Llama reads `attention_bias` for the output projection, too.
        found.setdefault("qkv_bias", found.pop("attention_bias", True))
    return found


def refuse_unserved(
    config: Mapping[str, Any],
    names: Collection[str] = (),
    tokens: Collection[str] = (),
    folder: Path | None = None,
) -> None:
    """Raise ValueError if a checkpoint is of a kind that is not served.

    `config`: keys of config.json and generation_config.json; `names`: the checkpoint's own, in
    lower case; `tokens`: of its tokenizer; `folder`: where its files lie, if they do.
    """
    for kind in UNSERVED:
        sign = kind.sign(config, names, tokens, folder)
        if sign is not None:
            raise ValueError(
                f"This checkpoint is {kind.title} ({sign}), which DiffuPlug does not serve: it "
                f"{kind.why}. You can {kind.instead}; {MODELS}."
            )


def refuse_unserved_model(model_config: "ModelConfig") -> None:
    """Raise ValueError as :func:`refuse_unserved`, by all that vLLM has read of a checkpoint."""
    config = model_config.hf_config.to_dict()
    tokens: Collection[str] = ()
    if any(config["model_type"] in kind.model_types for kind in UNSERVED if kind.token):
        tokens = tokenizer_ids(model_config)
    refuse_unserved(
        {**model_config.try_get_generation_config(), **config},
        checkpoint_names(model_config),
        tokens,
        _folder(model_config.model),
    )


def _folder(model: str) -> Path | None:
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else None


WITHOUT_LOADER = ("bitsandbytes", "gguf")
GENERATION = "generation_config.json"


def refuse_unserved_files(model: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError as :func:`refuse_unserved`, by what lies in a folder or by a name."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method in WITHOUT_LOADER:
        raise ValueError(
            f"{model} is stored as {method}, which vLLM cannot load: take a checkpoint in FP8, "
            "compressed-tensors, GPTQ or AWQ."
        )
    folder = _folder(model)
    names = model_names(model)
    if isinstance(config.get("_name_or_path"), str):
        names |= model_names(config["_name_or_path"])
    generation: Any = None
    if folder is not None and (folder / GENERATION).is_file():
        with suppress(ValueError):  # vLLM reports it
            generation = json.loads((folder / GENERATION).read_text())
    if not isinstance(generation, dict):
        generation = {}
    found = with_architecture({**generation, **config})
    refuse_unserved(found, names, folder=folder)


INDEX = "model.safetensors.index.json"


def check_listed(folder: Path) -> None:
    """Raise ValueError if the index of a whole checkpoint lists a file that is not there."""
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        absent = [name for name in sorted(set(names)) if not (folder / name).is_file()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"Cannot read '{index}': it lists no files of weights; download it again."
        ) from None
    if absent:
        raise ValueError(
            f"The folder {folder} lacks '{absent[0]}', which its {INDEX} lists: download it."
        )


def check_readable(folder: Path) -> None:
    """Raise ValueError with the first safetensors file whose header and length disagree."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_dir():
            raise ValueError(f"Cannot read '{path}': it is a folder.")
        try:
            # Without a framework nothing but the header is read.
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"Cannot read '{path}': the file is truncated or damaged ({error}); "
                "download it again."
            ) from error
        except OSError as error:
            raise ValueError(f"Cannot read '{path}': {error}.") from error


# Keys of published configs that change nothing of what a served model computes: of training, of
# other libraries, or read by transformers and vLLM before our classes are. One of them
# (`attention_layer_norm_with_affine`) is of a norm that no served checkpoint has.
HARMLESS = Path(__file__).with_name("harmless_keys.txt")


def unknown_keys(hf_config: Any) -> list[str]:
    """Return the keys of a config that neither its class knows nor `HARMLESS` lists.

    Keys without a value do not count.
    """
    known = {one.name for one in dataclasses.fields(hf_config)}
    known |= set(HARMLESS.read_text(encoding="utf-8").split())
    known |= set(hf_config.attribute_map) | set(hf_config.fixed)
    found = set()
    for key, value in hf_config.to_dict().items():
        if value is not None and key not in known:
            found.add(key)
    return sorted(found)
