"""Ask Linux for the AMX tiles of a CPU before attention uses them.

Linux ends a process that touches a tile register without having asked. vLLM's attention never asks.
Linear layers of oneDNN do, but a small model's layers may need none before its first attention.
"""

import torch
from vllm.config import ModelConfig

HEAD_MULTIPLE = 32  # head sizes for which the attention of vLLM uses tiles


def request_tiles(model_config: ModelConfig) -> None:
    """Ask for AMX tiles for this process and its threads.

    Raises ValueError if Linux refuses and the model's attention needs tiles.
    """
    if not torch.cpu._is_amx_tile_supported() or torch.cpu._init_amx():
        return
    in_bfloat16 = model_config.dtype == torch.bfloat16
    if in_bfloat16 and model_config.get_head_size() % HEAD_MULTIPLE == 0:
        raise ValueError(
            "this CPU has AMX, but Linux does not let this process use it, and vLLM's attention "
            "in bfloat16 needs it: use --dtype float32"
        )
