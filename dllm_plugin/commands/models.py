"""Find the model that a command names, before vLLM is imported: a folder or a name on the hub.

Imports neither torch nor vLLM.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dllm_plugin.config.adaptive import check_adaptive
from dllm_plugin.config.options import Options, check_active, check_block
from dllm_plugin.config.request.arguments import refuse_names
from dllm_plugin.config.validation import WholeNumber, did_you_mean, shown
from dllm_plugin.decoding.families import (
    DEFAULT_BLOCK,
    DRAFTS,
    FAMILIES,
    FULL_ATTENTION,
    NEMOTRON,
    OF_WHOLE_BLOCKS,
    Family,
    check_policy_name,
    choose_strategy,
    surely_unread,
)
from dllm_plugin.models import ARCHITECTURES, of_model_type
from dllm_plugin.models.catalogue import CHECKPOINTS, PAGES, hub_name
from dllm_plugin.models.checkpoints.unserved import (
    ADAPTER_CONFIG,
    check_listed,
    check_readable,
    refuse_unserved_files,
    with_architecture,
)

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
NEAR = 0.93  # of names that are taken for a misspelling of another
NEAREST = 3  # architectures that a refusal names
LISTED = "docs/models/README.md lists all"
HUB_SECONDS = 1.5
MEMORY_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
OF_CPUS = "On a CPU FP8 and INT4 need a checkpoint that is stored so, and experts bf16 or AMX."
SIZES = (
    *("d_model", "n_heads", "n_layers", "hidden_size"),
    *("num_attention_heads", "num_hidden_layers", "vocab_size"),
)
POSITIVE = WholeNumber(1, open=True)
CONTEXTS = ("max_position_embeddings", "max_sequence_length")
OF_ROPE = ("rope_scaling", "rope_parameters")
OF_POSITIONS = ("canvas_length", "block_length", "window", "max_window", "min_window")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def resolve(model: str) -> str:
    """Return the folder or hub name that `model`, which may be a short name, stands for.

    Raises ValueError if it stands for none.
    """
    if not model:
        raise ValueError(
            "the name of the model is empty: leave it out for the bundled one"
        )
    if Path(model).expanduser().is_dir():
        return model
    name = hub_name(model)
    if name != model:
        print(f"diffuplug: {model} is {name}", file=sys.stderr)
    return name


def run(name: str | None) -> int:
    """Print the public checkpoints, or one of them; return the exit status."""
    if name is not None and name not in CHECKPOINTS:
        known = did_you_mean(name.lower(), CHECKPOINTS)
        raise ValueError(f"{name} is no short name of a checkpoint{known}")
    memory = usable_memory()
    if name is not None:
        print_checkpoint(name, memory)
        return 0
    row = "{:22} {:55} {:>6} {:>6} {:>6}  {:9} {}"
    print(
        row.format(
            "name", "on the hub", "bf16", "FP8", "INT4", "fits here", "by default"
        )
    )
    for name, found in CHECKPOINTS.items():
        sizes = [f"{size:.1f}" for size in found.gigabytes()]
        fits = found.fits(memory, has_gpu())
        print(row.format(name, found.hub, *sizes, fits, found.decoding))
    print(
        f"\nSizes of the weights in GB; this machine has {memory:.0f} GB for a model."
    )
    if not has_gpu():
        print(OF_CPUS)
    return 0


def print_checkpoint(name: str, memory: float) -> None:
    """Print how to serve a checkpoint."""
    found = CHECKPOINTS[name]
    bf16, fp8, int4 = found.gigabytes()
    print(f"{found.hub} ({found.architecture}, {found.context} positions)")
    print(f"  serve     diffuplug serve {name} --max-model-len {found.context}")
    print(f"  decoding  {found.decoding}")
    print(f"  weights   {bf16:.1f} GB in bf16, {fp8:.1f} in FP8, {int4:.1f} in INT4")
    print(f"  KV cache  {found.kv_gigabytes():.2f} GB per 1,000 tokens in bf16")
    print(f"  fits      {found.fits(memory, has_gpu())}, of {memory:.0f} GB")
    if not has_gpu():
        print(f"  on CPUs   {OF_CPUS}")
    print(f"  settings and scores of its authors: {PAGES}{found.page}")


def has_gpu() -> bool:
    """Return whether the memory is a GPU's, whose kernels quantise while weights load."""
    import torch

    return torch.cuda.is_available()


def usable_memory() -> float:
    """Return the memory that vLLM takes by default, in GB: of a GPU, or of this machine."""
    if has_gpu():
        import torch

        return MEMORY_SHARE * torch.cuda.mem_get_info()[1] / 1e9
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    # Of one NUMA node, and within a container's limit.
    return MEMORY_SHARE * get_memory_node_info().total_memory / 1e9


def check_model(model: str) -> None:
    """Raise ValueError unless `model` is a checkpoint that DiffuPlug serves."""
    if is_elsewhere(model):
        return
    refuse_unserved(model, _checked_config(model))


def check_files(model: str) -> None:
    """Raise ValueError unless `model` is a checkpoint that can be reported on."""
    if not is_elsewhere(model):
        refuse_unserved_files(model, read_config(model))


def is_elsewhere(model: str) -> bool:
    """Return whether vLLM reads a model from a place that is not looked at here."""
    if Path(model).expanduser().is_dir():
        return False
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return True
    return ":" in model or model.endswith(".gguf")


def refuse_unserved(model: str, config: dict[str, Any]) -> None:
    """Raise ValueError for a checkpoint that DiffuPlug does not serve."""
    if reason := why_unserved(model, config):
        raise ValueError(reason)


def why_unserved(model: str, config: dict[str, Any]) -> str:
    """Return why DiffuPlug does not serve a checkpoint; empty if it does."""
    architecture = architecture_of(config)
    if architecture in ARCHITECTURES:
        return ""
    if architecture is None:
        why = "its config.json names no architecture"
        if ours := of_model_type(config):
            why += f"; its model_type suggests {json.dumps({'architectures': [ours]})}"
        return f"{model} is no model of DiffuPlug: {why}; {LISTED}"
    near = get_close_matches(str(architecture), ARCHITECTURES, NEAREST, cutoff=0.0)
    return (
        f"{model} is no model of DiffuPlug: its architecture is {architecture}, and the "
        f"nearest that DiffuPlug serves are {', '.join(near[:-1])} and {near[-1]}; "
        + LISTED
        + did_you_mean(str(architecture), ARCHITECTURES, cutoff=NEAR)
    )


def check_served(model: str, options: dict[str, Any]) -> None:
    """Raise ValueError unless `model` is a checkpoint that a server may be able to serve.

    vLLM serves models of others, too, but those read none of our `options`.
    """
    config = _checked_config(model)
    found = architecture_of(config)
    architecture = str(found)
    if architecture in ARCHITECTURES:
        return
    if found is None and of_model_type(config):
        refuse_unserved(model, config)
    if did_you_mean(architecture, ARCHITECTURES, cutoff=NEAR):
        refuse_unserved(model, config)
    if options:
        raise ValueError(
            f"{model} is no diffusion model of DiffuPlug (its architecture is "
            f"{architecture}): {', '.join(sorted(options))} would have no effect"
        )


def check_decoding(model: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a strategy, policy or option that the model's family does not have.

    The engine checks what depends on more than one of them.
    """
    for adapter in ("lora_path", "draft_adapter"):
        if options.get(adapter) == "":
            raise ValueError(f"{adapter} is empty: name a folder, or leave it out.")
        folder = options.get(adapter) or ""
        if folder.startswith("~"):
            raise ValueError(f"{adapter} {folder} begins with ~: write the whole path.")
        check_folder(folder)
        is_here = bool(folder) and Path(folder).is_dir()
        if is_here and not (Path(folder) / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"{adapter} {folder} holds no {ADAPTER_CONFIG}: is it an adapter?"
            )
    if not options or is_elsewhere(model):
        return
    config = read_config(model)
    architecture = str(architecture_of(config))
    if architecture not in FAMILIES:
        return
    for name in OF_POSITIONS:
        check_fits(name, options.get(name), config)
    family = FAMILIES[architecture]
    adapted = bool(options.get("lora_path"))
    strategy, _ = choose_strategy(options.get("strategy", "auto"), family, adapted)
    check_adaptive(Options.from_user(options), strategy, family, "threshold")
    if options.get("adaptive", "off") == "off":
        check_policy_name(options.get("policy", "auto"), strategy, family)
        unread = surely_unread(strategy, family)
        refuse_names(options, unread, strategy, architecture)
    _check_block(options, strategy, family, config)


def _check_block(
    options: dict[str, Any], strategy: str, family: Family, config: dict[str, Any]
) -> None:
    """Raise ValueError for a block, or drafts, that training or the canvas given rules out."""
    trained = config.get(family.block_key or "") or family.block_length
    name, default = DRAFTS.get(strategy, ("block_length", DEFAULT_BLOCK))
    if strategy in FULL_ATTENTION:
        default = 1  # shortened to the canvas
    block = options.get(name) or trained or default
    canvas = options.get("canvas_length")
    if canvas is not None and family is NEMOTRON:
        # A causal commit also decides the position after its block.
        canvas -= 1
    if not isinstance(block, int):
        return
    check_block(strategy, family, block, trained, canvas)
    if strategy in OF_WHOLE_BLOCKS and canvas is not None:
        check_active(options.get("max_active_blocks", 1), block, canvas)


def check_length(name: str, positions: int, model: str) -> None:
    """Raise ValueError for more positions than a model has, if its files are looked at here."""
    if not is_elsewhere(model):
        check_fits(name, positions, read_config(model))


def check_fits(name: str, positions: int | None, config: dict[str, Any]) -> None:
    """Raise ValueError for more positions than a model has, if its configuration tells."""
    lengths = [config[key] for key in CONTEXTS if isinstance(config.get(key), int)]
    rope = [config.get(key) for key in OF_ROPE]
    scaled = any(isinstance(values, dict) and "factor" in values for values in rope)
    if not lengths or scaled or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        return
    if positions is not None and positions > max(lengths):
        raise ValueError(
            f"{name} {positions} is longer than the context of {max(lengths)} tokens: "
            "lower it."
        )


def read_config(model: str) -> dict[str, Any]:
    """Return the contents of a checkpoint's ``config.json``. Raises ValueError."""
    path = config_path(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    packing = config.get("quantization_config")
    if not isinstance(packing, dict | None):
        raise ValueError(
            f"{path}: quantization_config must be an object, got {shown(packing)}"
        )
    if architecture_of(config) in ARCHITECTURES:
        for name in SIZES:
            POSITIVE(f"{path}: {name}", config.get(name))
    tokenizer = path.parent / TOKENIZER
    # Parsing it takes long, and a download that was cut ends anywhere.
    if tokenizer.is_file() and not tokenizer.read_bytes().rstrip().endswith(b"}"):
        raise ValueError(
            f"{tokenizer} is truncated or damaged: it does not end as JSON does; download it "
            "again"
        )
    return config


def architecture_of(config: dict[str, Any]) -> Any:
    """Return the name of a checkpoint's architecture; None if its configuration has none."""
    names = with_architecture(config).get("architectures")
    return names[0] if isinstance(names, list) and names else None


def config_path(model: str) -> Path:
    """Return where a model's ``config.json`` lies, fetched if need be. Raises ValueError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"the folder {model} holds no {CONFIG}: is it a checkpoint?"
            )
        return folder / CONFIG
    check_folder(model)
    return _fetched(model)


def check_folder(model: str) -> None:
    """Raise ValueError if `model` is written like a path and there is no such folder."""
    folder = Path(model).expanduser()
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if folder.is_dir() or not is_path:
        return
    if folder.exists():
        raise ValueError(f"{model} is no folder")
    beside = os.listdir(folder.parent) if folder.parent.is_dir() else []
    raise ValueError(f"there is no folder {model}" + did_you_mean(folder.name, beside))


def _checked_config(model: str) -> dict[str, Any]:
    """Return a checkpoint's configuration. Raises ValueError for a folder without weights."""
    config = read_config(model)
    folder = Path(model).expanduser()
    refuse_unserved_files(model, config)
    if folder.is_dir() and not any(any(folder.glob(form)) for form in WEIGHTS):
        raise ValueError(f"the folder {model} holds no weights (*.safetensors)")
    if folder.is_dir():
        check_listed(folder)
        check_readable(folder)
    return config


def _fetched(name: str) -> Path:
    """Return the path of ``config.json`` of a name on the hub, from its cache or the hub."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:
        raise ValueError(
            f"{name!r} is neither a folder nor a name on the hub"
        ) from None
    if isinstance(cached, str):
        return Path(cached)
    absent = f"there is no folder {name}, and the hub's cache holds no such model"
    hub = f"the hub ({constants.ENDPOINT})"
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{absent}; HF_HUB_OFFLINE keeps it from being fetched")
    if not _reachable(constants.ENDPOINT):
        raise ValueError(f"{absent}; {hub} cannot be reached")
    try:
        return Path(hf_hub_download(name, CONFIG))
    except RepositoryNotFoundError:
        raise ValueError(
            f"there is no folder {name}, and no model of that name on the hub that "
            "you may read"
        ) from None
    except LocalEntryNotFoundError as error:
        why = error.__cause__ or error
        raise ValueError(f"{absent}; {hub} did not answer: {why}") from None


def _reachable(address: str) -> bool:
    """Return whether a server may answer. Asks once; a download asks for half a minute.

    A slow one may, and one with a certificate that only the hub's client knows.
    """
    try:
        urllib.request.urlopen(address, timeout=HUB_SECONDS).close()
    except (urllib.error.HTTPError, TimeoutError, ConnectionError):
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, TimeoutError | ssl.SSLError)
    return True
