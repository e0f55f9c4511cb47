"""Classifier-free guidance: a request and its hidden partner, which sees masks for a prompt.

The partner is an ordinary request of vLLM's with pages and a row of its own. The scheduler runs
both in the same steps and shows only the first to the outside; the partner's canvas is a copy of
the request's. LLaDA ``generate.py``: ``logits = u + (cfg_scale + 1) * (logits - u)``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PARTNER_SUFFIX = "\0unguided"  # no client can send such an id


def partner_of(request_id: str) -> str:
    """Id of a guided request's hidden partner."""
    return request_id + PARTNER_SUFFIX


def leader_of(request_id: str) -> str:
    """Id of the request that a hidden partner belongs to."""
    return request_id.removesuffix(PARTNER_SUFFIX)


def is_partner(request_id: str) -> bool:
    """Whether this is a hidden request."""
    return request_id.endswith(PARTNER_SUFFIX)


def pair_rows(req_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Places in the batch of the requests that decide, and of their partners (else their own)."""
    place = {req_id: i for i, req_id in enumerate(req_ids)}
    leaders = [i for i, req_id in enumerate(req_ids) if not is_partner(req_id)]
    partners = [place.get(partner_of(req_ids[i]), i) for i in leaders]
    return np.array(leaders, dtype=np.int64), np.array(partners, dtype=np.int64)


def partner_places(req_ids: Sequence[str]) -> np.ndarray:
    """Pairs of places in the batch, of a guided request and its partner: int64 ``[P, 2]``."""
    place = {req_id: i for i, req_id in enumerate(req_ids)}
    partners = [(leader_of(r), i) for r, i in place.items() if is_partner(r)]
    pairs = [(place[leader], i) for leader, i in partners if leader in place]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def context_rows(bounds_np: np.ndarray, partners: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Rows of a step that partners must not know: all that their canvas has for a prompt.

    Args:
        bounds_np: where each request's rows start, int ``[R + 1]``.
        partners: places in the batch, int64 ``[P]``; each computes from position 0 on.
        first: first position of the canvas of each, int64 ``[P]``.
    """
    spans = [np.arange(n) + bounds_np[i] for i, n in zip(partners, first, strict=True)]
    return np.concatenate([np.empty(0, dtype=np.int64), *spans]).astype(np.int64)


class GuidedRows(NamedTuple):
    """Which rows of a step are guided.

    guided_T bool, among the rows of the requests that decide; scale_G float32, of those.
    """

    guided_T: Tensor
    scale_G: Tensor

    def combine(self, logits_TV: Tensor, num_rows: int) -> Tensor:
        """Logits of the deciding requests; the partners' rows stand behind `num_rows`."""
        guided_TV, unguided_GV = logits_TV[:num_rows], logits_TV[num_rows:]
        scale_G1 = (self.scale_G + 1.0)[:, None].to(logits_TV.dtype)
        mixed_GV = unguided_GV + scale_G1 * (guided_TV[self.guided_T] - unguided_GV)
        place_G = self.guided_T.nonzero().squeeze(1)
        return torch.index_copy(guided_TV, 0, place_G, mixed_GV)
