"""Guide a request by its unconditional copy (classifier-free guidance).

A guided request is *conditional*. With it runs a hidden *unconditional* request, an ordinary one of
vLLM's with pages of its own, which sees masks in place of the prompt. The scheduler computes both
in the same steps and reports only the conditional one; after each step the unconditional one gets a
copy of its canvas. LLaDA ``generate.py``:
``logits = u + (cfg_scale + 1) * (logits - u)``, where u are the unconditional logits. Shape letters
as in :mod:`dllm_plugin.decoding.plan`; G guided rows, P pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.config.worker_carriers import is_unconditional, pack_unconditional


def pair_requests(req_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the places in the batch of the requests that decide, and of what guides them.

    The second is the place of the unconditional request, or the request's own without guidance.
    """
    place = {req_id: i for i, req_id in enumerate(req_ids)}
    deciding, guiding = [], []
    for req_id, i in place.items():
        if not is_unconditional(req_id):
            deciding.append(i)
            guiding.append(place.get(pack_unconditional(req_id), i))
    return np.array(deciding, dtype=np.int64), np.array(guiding, dtype=np.int64)


def context_rows(
    bounds_np: np.ndarray, unconditional: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Return the rows of a step that unconditional requests must not see: all before the canvas.

    Args:
        bounds_np: first row of each request, int ``[R + 1]``.
        unconditional: places in the batch, int64 ``[P]``; each computes from position 0 on.
        first: first position of the canvas of each, int64 ``[P]``.
    """
    rows = [np.empty(0, dtype=np.int64)]
    for i, count in zip(unconditional, first, strict=True):
        rows.append(bounds_np[i] + np.arange(count))
    return np.concatenate(rows).astype(np.int64)


class GuidedRows(NamedTuple):
    """List the guided rows of a step, and their scales.

    place_G int64, among the rows of the requests that decide; scale_G float32, of those
    """

    place_G: Tensor
    scale_G: Tensor

    def combine(self, logits_TV: Tensor, num_rows: int) -> Tensor:
        """Return the guided logits of the `num_rows` first rows; unconditional rows follow them."""
        conditional_TV = logits_TV[:num_rows]
        unconditional_GV = logits_TV[num_rows:]
        scale_G1 = (self.scale_G + 1.0)[:, None].to(logits_TV.dtype)
        difference_GV = conditional_TV[self.place_G] - unconditional_GV
        guided_GV = unconditional_GV + scale_G1 * difference_GV
        return torch.index_copy(conditional_TV, 0, self.place_G, guided_GV)
