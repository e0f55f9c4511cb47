"""Filter logits by min_p, top-k and top-p. Shape letters as in :mod:`dllm_plugin.decoding.plan`.

On CPUs top-k and top-p do not sort token ids: torch sorts a row of 126,464 logits with their ids in
9 ms, NumPy the logits without ids in 0.3.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.state.canvas_states import CanvasStates
from dllm_plugin.state.request_table import GREEDY_FILTERS


def keep_by_order(logits_TV: Tensor, top_k_T: Tensor | None, top_p_T: Tensor) -> Tensor:
    """Ban, in place, all but the likeliest tokens of each row; of equal tokens lower ids stay."""
    ordered_TV = torch.from_numpy(np.sort(logits_TV.numpy(), axis=-1))
    if top_k_T is not None:
        place_T = ordered_TV.shape[1] - top_k_T.to(torch.int64)
        least_T1 = ordered_TV.gather(1, place_T[:, None])
        ordered_TV.masked_fill_(ordered_TV < least_T1, -torch.inf)
        logits_TV.masked_fill_(logits_TV < least_T1, -torch.inf)
    probs_TV = ordered_TV.softmax(dim=-1)
    summed_TV = torch.cumsum(probs_TV, dim=-1, out=probs_TV)
    is_out_TV = summed_TV <= 1 - top_p_T[:, None]
    is_out_TV[:, -1] = False  # at least one stays
    out_T1 = is_out_TV.sum(dim=-1, keepdim=True)
    least_T1 = ordered_TV.gather(1, out_T1)
    tied_out_T1 = out_T1 - (ordered_TV < least_T1).sum(dim=-1, keepdim=True)
    if tied_out_T1.any():
        is_tied_TV = logits_TV == least_T1
        tied_in_T1 = is_tied_TV.sum(dim=-1, keepdim=True) - tied_out_T1
        is_tied_TV &= is_tied_TV.cumsum(dim=-1) > tied_in_T1
        logits_TV.masked_fill_(is_tied_TV, -torch.inf)
    logits_TV.masked_fill_(logits_TV < least_T1, -torch.inf)
    return logits_TV


TopFilter = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class Filters:
    """Filter rows by the numbers of their requests; `keep_top` is vLLM's filter by both tops."""

    def __init__(
        self, states: CanvasStates, sampling_states: Any, keep_top: TopFilter
    ) -> None:
        self.states = states
        self.sampling_states = sampling_states
        self.keep_top = keep_top
        self.on_cpu = states.device.type == "cpu"

    def users(self, slots_np: np.ndarray) -> np.ndarray:
        """Return which of the slots filter, bool."""
        sampling = self.sampling_states
        users = self.states.requests.users
        filtered = sampling.min_p.np[slots_np] != 0
        filtered |= sampling.top_k.np[slots_np] != sampling.vocab_size
        filtered |= sampling.top_p.np[slots_np] != 1.0
        filtered &= sampling.temperature.np[slots_np] > 0
        for name in GREEDY_FILTERS:
            filtered |= users(name, slots_np)
        return filtered

    def apply(self, logits_TV: Tensor, slot_T: Tensor, slots_np: np.ndarray) -> Tensor:
        """Filter rows of sampling requests, in place if possible."""
        sampling = self.sampling_states
        if not len(logits_TV):
            return logits_TV
        if sampling.min_p.np[slots_np].any():
            floor_T = logits_TV.amax(dim=-1) + sampling.min_p.gpu[slot_T].log()
            logits_TV.masked_fill_(logits_TV < floor_T[:, None], -torch.inf)
        top_k = top_p = None
        if (sampling.top_k.np[slots_np] != sampling.vocab_size).any():
            top_k = sampling.top_k.gpu[slot_T]
        if (sampling.top_p.np[slots_np] != 1.0).any():
            top_p = sampling.top_p.gpu[slot_T]
        return self._keep(logits_TV, top_k, top_p)

    def apply_greedy(
        self, logits_TV: Tensor, slot_T: Tensor, slots_np: np.ndarray
    ) -> Tensor:
        """Temper and filter rows of greedy requests: it changes the confidence, not the token.

        Sampling requests have no such filters: their numbers are neutral here.
        """
        requests = self.states.requests
        vocab_size = logits_TV.shape[1]
        top_k = top_p = None
        if requests.uses("entropy_temperature", slots_np):
            temperature_T = requests.number("entropy_temperature", slot_T)
            logits_TV = logits_TV / temperature_T[:, None]
        if requests.uses("top_k", slots_np):
            top_k = requests.number("top_k", slot_T).to(torch.int32)
            top_k = top_k.where(top_k > 0, vocab_size).clamp_max(vocab_size)
        if requests.uses("top_p", slots_np):
            top_p = requests.number("top_p", slot_T)
        return self._keep(logits_TV, top_k, top_p)

    def _keep(
        self, logits_TV: Tensor, top_k: Tensor | None, top_p: Tensor | None
    ) -> Tensor:
        """Filter by top-k and top-p in the order of the method."""
        if not len(logits_TV) or (top_k is None and top_p is None):
            return logits_TV
        if self.states.config.method.top_p_first and top_k is not None:
            logits_TV = self._keep_top(logits_TV, None, top_p)
            return self._keep_top(logits_TV, top_k, None)
        return self._keep_top(logits_TV, top_k, top_p)

    def _keep_top(
        self, logits_TV: Tensor, top_k: Tensor | None, top_p: Tensor | None
    ) -> Tensor:
        """Filter by top-k, then top-p."""
        if self.on_cpu and top_p is not None:
            return keep_by_order(logits_TV, top_k, top_p)
        return self.keep_top(logits_TV, top_k, top_p)
