"""Filter logits by top-k, then top-p, as vLLM does, but without its sort of all token ids: CPUs.

Torch sorts a row of 126,464 logits with their ids in 9 ms, NumPy the logits alone in 0.3.
"""

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.kernels.confidence.reference import NEGATIVE_INFINITY


def keep_by_order(logits_TV: Tensor, top_k_T: Tensor | None, top_p_T: Tensor) -> Tensor:
    """Ban, in place, all but the likeliest tokens of each row; of equal ones lower ids stay."""
    ordered_TV = torch.from_numpy(np.sort(logits_TV.numpy(), axis=-1))
    if top_k_T is not None:
        least_T1 = ordered_TV.gather(1, ordered_TV.shape[1] - top_k_T.to(torch.int64)[:, None])
        ordered_TV.masked_fill_(ordered_TV < least_T1, NEGATIVE_INFINITY)
        logits_TV.masked_fill_(logits_TV < least_T1, NEGATIVE_INFINITY)
    probs_TV = ordered_TV.softmax(dim=-1)
    is_out_TV = torch.cumsum(probs_TV, dim=-1, out=probs_TV) <= 1 - top_p_T[:, None]
    is_out_TV[:, -1] = False  # at least one stays
    out_T1 = is_out_TV.sum(dim=-1, keepdim=True)
    least_T1 = ordered_TV.gather(1, out_T1)
    tied_out_T1 = out_T1 - (ordered_TV < least_T1).sum(dim=-1, keepdim=True)
    if tied_out_T1.any():
        is_tied_TV = logits_TV == least_T1
        tied_in_T1 = is_tied_TV.sum(dim=-1, keepdim=True) - tied_out_T1
        logits_TV.masked_fill_(
            is_tied_TV & (is_tied_TV.cumsum(dim=-1) > tied_in_T1), NEGATIVE_INFINITY
        )
    logits_TV.masked_fill_(logits_TV < least_T1, NEGATIVE_INFINITY)
    return logits_TV
