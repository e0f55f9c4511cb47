"""Check adapters that requests choose by name, as strictly as the one that is merged at load.

vLLM takes an adapter of another base, or with matrices missing, and answers worse without a word.
"""

import re
from collections.abc import Iterable

from dllm_plugin.decoding.methods import Method
from dllm_plugin.models.checkpoints.lora import LoraAdapter, model_names

D2F_NAME = re.compile(r"(?<![a-z0-9])d2f(?![a-z0-9])", re.IGNORECASE)
IN_A_LAYER = re.compile(r"\.\d+\.")


def check_layers_alone(adapter: LoraAdapter) -> None:
    """Raise ValueError if the adapter updates the embedding or the LM head."""
    for module in adapter.pairs:
        if not IN_A_LAYER.search(module):
            raise ValueError(
                f"Adapter '{adapter.path}' updates '{module}', which lies in no layer: requests "
                "can choose updates only of layers. Merge it by lora_path."
            )


def check_strategy(adapter: LoraAdapter, name: str, method: Method) -> None:
    """Raise ValueError if the adapter's name shows that it was trained for another strategy."""
    names: Iterable[str] = {name, *model_names(adapter.path)}
    if not method.uses_adapter and any(map(D2F_NAME.search, names)):
        raise ValueError(
            f"Adapter '{name}' was trained for the strategy 'd2f', as the name of '{adapter.path}' "
            f"says, but this engine decodes by '{method.strategy}': set strategy to 'd2f', or give "
            "the adapter another name."
        )
