"""Ban end-of-sequence tokens for two options of LLaDA's ``generate.py``.

With ``logits_eos_inf`` EOS is never proposed. With ``confidence_eos_eot_inf`` EOS and end-of-turn
tokens may be proposed, but get no confidence and so are unmasked last. Shape letters as in
:mod:`dllm_plugin.decoding.plan`.
"""

import numpy as np
from torch import Tensor
from vllm.config import ModelConfig

from dllm_plugin.kernels.confidence.reference import NEGATIVE_INFINITY
from dllm_plugin.state.canvas_states import CanvasStates

NO_PROPOSAL = "logits_eos_inf"
NO_CONFIDENCE = "confidence_eos_eot_inf"


class EosBans:
    """Ban tokens in place in the rows of requests that have set one of the options."""

    def __init__(self, states: CanvasStates, model_config: ModelConfig) -> None:
        self.states = states
        eos = getattr(model_config.hf_config, "eos_token_id", None)
        ids = eos if isinstance(eos, list) else [eos]
        self.eos_ids = [i for i in ids if i is not None]
        self.turn_end_ids = list(states.config.turn_end_token_ids)

    def users(self, slots_np: np.ndarray) -> np.ndarray:
        """Return which of the slots have set one of the options, bool."""
        requests = self.states.requests
        return requests.users(NO_PROPOSAL, slots_np) | requests.users(
            NO_CONFIDENCE, slots_np
        )

    def ban_proposals(
        self, logits_TV: Tensor, slot_T: Tensor, slots_np: np.ndarray
    ) -> None:
        """Ban what may not be proposed."""
        self._ban(logits_TV, NO_PROPOSAL, slot_T, slots_np, self.eos_ids)

    def ban_confidence(
        self,
        logits_TV: Tensor,
        slot_T: Tensor,
        slots_np: np.ndarray,
        is_greedy_T: Tensor,
    ) -> None:
        """Ban what may have no confidence, once tokens are proposed.

        EOS only in greedy rows: LLaDA's code bans it in the logits with noise, but reads the
        confidence from those without. Only at temperature 0 are the two the same tensor.
        """
        self._ban(logits_TV, NO_CONFIDENCE, slot_T, slots_np, self.turn_end_ids)
        self._ban(logits_TV, NO_CONFIDENCE, slot_T, slots_np, self.eos_ids, is_greedy_T)

    def _ban(
        self,
        logits_TV: Tensor,
        option: str,
        slot_T: Tensor,
        slots_np: np.ndarray,
        ids: list[int],
        among_T: Tensor | None = None,
    ) -> None:
        """Ban ids in the rows (of `among_T`, if given) whose requests have set an option."""
        if not self.states.requests.uses(option, slots_np):
            return
        rows_T = self.states.requests.number(option, slot_T) > 0
        if among_T is not None:
            rows_T &= among_T
        for i in ids:
            logits_TV[:, i].masked_fill_(rows_T, NEGATIVE_INFINITY)
