"""Keep the numbers of each running request: the host writes them, steps read them on the device.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N is the number of slots.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dllm_plugin.config.decode import DecodeConfig, RequestConfig
from dllm_plugin.config.options import COLUMNS
from dllm_plugin.decoding.policies import POLICY_NAMES, PolicySettings
from dllm_plugin.state.slot_table import SlotTable

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

POLICY_IDS = {name: i for i, name in enumerate(POLICY_NAMES)}


class RequestTable:
    """Hold one row per slot, in tables that the host fills and copies.

    prompt_len_np  int64, on the host only
    origin         int64, absolute position from which blocks are counted
    block_length   int64, positions of a block
    max_blocks     int64, block slots that a step looks at
    end            int64, absolute position where the text ends at most
    policy         int32, index into POLICY_IDS
    steps          int32, denoising steps of a block
    numbers        float32 ``[N, len(COLUMNS)]``
    """

    def __init__(self, config: DecodeConfig, num_slots: int, device: torch.device) -> None:
        self.config = config
        self.prompt_len_np = np.zeros(num_slots, dtype=np.int64)
        self.origin = SlotTable(num_slots, torch.int64, device)
        self.block_length = SlotTable(num_slots, torch.int64, device)
        self.max_blocks = SlotTable(num_slots, torch.int64, device)
        self.end = SlotTable(num_slots, torch.int64, device)
        self.policy = SlotTable(num_slots, torch.int32, device)
        self.steps = SlotTable(num_slots, torch.int32, device)
        self.numbers = SlotTable((num_slots, len(COLUMNS)), torch.float32, device)
        self.block_length.np.fill(config.block_length)
        self.steps.np.fill(1)
        self._tables = (
            *(self.origin, self.block_length, self.max_blocks, self.end),
            *(self.policy, self.steps, self.numbers),
        )
        self._dirty = True

    def fill(
        self,
        slot: int,
        prompt_len: int,
        end: int,
        request: RequestConfig,
        params: "SamplingParams",
    ) -> None:
        """Write the row of a request; `copy_to_device` brings it to the device."""
        config = self.config
        self.prompt_len_np[slot] = prompt_len
        # Where blocks are counted from: some models were trained on multiples of their length.
        self.origin.np[slot] = 0 if config.family.absolute_grid else prompt_len
        self.block_length.np[slot] = request.block_length
        stores_too = config.method.next_block and not config.dedicated_commit
        most = config.block_slots if stores_too else request.max_active_blocks
        self.max_blocks.np[slot] = most
        self.end.np[slot] = end
        self.policy.np[slot] = POLICY_IDS[request.policy]
        self.steps.np[slot] = request.steps
        if params.temperature > 0:
            # Filters of greedy requests; vLLM's own are in force here.
            request = dataclasses.replace(request, top_p=1.0, top_k=0)
        self.numbers.np[slot] = [float(getattr(request, name) or 0) for name in COLUMNS]
        self._dirty = True

    def copy_to_device(self) -> None:
        """Bring what was written since the last call to the device."""
        if self._dirty:
            for table in self._tables:
                table.copy_to_device()
            self._dirty = False

    def number(self, name: str, slots: Tensor) -> Tensor:
        """Return one column of `numbers`, float32, for the given slots."""
        return self.numbers.gpu[slots, COLUMNS.index(name)]

    def policies(self, slots_np: np.ndarray) -> set[str]:
        """Return the names of the policies of the given slots."""
        return {POLICY_NAMES[i] for i in set(self.policy.np[slots_np].tolist())}

    def uses(self, name: str, slots_np: np.ndarray) -> bool:
        """Return whether one of the given slots has set an option that is off by default."""
        off = 1.0 if name == "top_p" else 0.0
        return bool((self.numbers.np[slots_np, COLUMNS.index(name)] != off).any())

    def policy_settings(self, slots_R: Tensor) -> PolicySettings:
        """Return the numbers of the policies for the requests of a step."""
        return PolicySettings(
            threshold_R=self.number("threshold", slots_R),
            factor_R=self.number("factor", slots_R),
            eps_R=self.number("eps", slots_R),
            steps_R=self.steps.gpu[slots_R],
            block_length_R=self.block_length.gpu[slots_R],
            editing_threshold_R=self.number("editing_threshold", slots_R),
            num_to_transfer_R=self.number("num_to_transfer", slots_R),
        )
