"""Store numbers and templates of running requests: the host writes, steps read on the device.

Shape letters as in :mod:`dllm_plugin.decoding.plan`; N is the number of slots.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from dllm_plugin.config.decode import DecodeConfig, layout_of
from dllm_plugin.config.options import COLUMNS, FILL
from dllm_plugin.config.request.arguments import RequestArguments, Template
from dllm_plugin.decoding.families import POLICY_NAMES
from dllm_plugin.decoding.full_attention import NO_LIMIT, NO_TEMPLATE, Layout
from dllm_plugin.decoding.policies import PolicySettings

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class SlotTable:
    """Pair `np`, the host's copy, with `gpu`, always at the same place in device memory.

    vLLM's own tables stay in host memory that the device can read, which each kernel then does
    anew, and are copied in every step. These are copied when `copy_to_device` is called, in the
    order of the stream: work that is queued still reads what was there before.
    """

    def __init__(
        self, size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.np: np.ndarray = torch.zeros(size, dtype=dtype).numpy()
        self.gpu = torch.zeros(size, dtype=dtype, device=device)
        self._is_new = False

    def write(self, slot: Any, values: Any) -> None:
        """Write values of a slot on the host; `copy_to_device` brings them to the device."""
        self.np[slot] = values
        self._is_new = True

    def copy_to_device(self) -> None:
        """Copy what was written since the last call, without waiting for the copy."""
        if self._is_new:
            async_tensor_h2d(self.np, out=self.gpu)
            self._is_new = False


# Options that filter the rows of greedy requests.
GREEDY_FILTERS = ("top_p", "top_k", "entropy_temperature")
POLICY_IDS = {name: i for i, name in enumerate(POLICY_NAMES)}


class RequestTable:
    """Store one row per slot, in tables that the host fills and copies.

    prompt_len_np  int64, on the host only
    layouts_np     int64, on the host only; the fields of `Layout`
    origin         int64, absolute position from which blocks are counted
    block_length   int64, positions of a block
    max_blocks     int64, block slots that a step looks at
    end            int64, absolute position where the text ends at most
    blocks_end     int64, the same of its blocks: the last one is decoded whole and trimmed, unless
                   the context, a template, or by the method the text ends inside it
    policy         int32, index into POLICY_IDS
    steps          int32, denoising steps of a block
    numbers        float32 ``[N, len(COLUMNS)]``
    asked          options of `numbers` that any request has set so far: others need no look
    refreshes_vary  whether any request so far has asked for refreshes of two kinds
    """

    def __init__(
        self, config: DecodeConfig, num_slots: int, device: torch.device
    ) -> None:
        self.config = config
        self.prompt_len_np = np.zeros(num_slots, dtype=np.int64)
        empty = (0, 0, config.block_length, 1, NO_LIMIT, NO_LIMIT, NO_TEMPLATE)
        row_np = np.array(empty, dtype=np.int64)
        self.layouts_np = np.tile(row_np, (num_slots, 1))
        self._tables: list[SlotTable] = []

        def table(size: Any, dtype: torch.dtype = torch.int64) -> SlotTable:
            made = SlotTable(size, dtype, device)
            self._tables.append(made)
            return made

        self.origin = table(num_slots)
        self.block_length = table(num_slots)
        self.max_blocks = table(num_slots)
        self.end = table(num_slots)
        self.blocks_end = table(num_slots)
        self.policy = table(num_slots, torch.int32)
        self.steps = table(num_slots, torch.int32)
        self.numbers = table((num_slots, len(COLUMNS)), torch.float32)
        self.block_length.write(..., config.block_length)
        # vLLM's profiling run divides by it before any step has copied a table.
        self.block_length.copy_to_device()
        self.steps.write(..., 1)
        self.asked: set[str] = set()
        self.refreshes_vary = False

    def fill(
        self,
        slot: int,
        prompt_len: int,
        end: int,
        request: RequestArguments,
        params: "SamplingParams",
        context: int,
    ) -> None:
        """Write the row of a request; `copy_to_device` brings it to the device."""
        config = self.config
        template = request.template
        method = config.method
        length = request.block_length
        self.prompt_len_np[slot] = prompt_len
        self.refreshes_vary |= request.full_refresh_every != 1
        # Where blocks are counted from: some models were trained on multiples of their length.
        origin = config.origin(prompt_len, length)
        self.origin.write(slot, origin)
        self.layouts_np[slot] = layout_of(request, origin, end, template)
        blocks = -(-(end - origin) // length)
        # If blocks may start anywhere, the last block may begin just before the end.
        blocks += method.verifies
        last = min(origin + blocks * length, context)
        ends_exactly = template is not None or method.exact_end
        self.blocks_end.write(slot, end if ends_exactly else last)
        self.block_length.write(slot, length)
        stores_too = method.next_block and not config.dedicated_commit
        most = config.block_slots if stores_too else request.max_active_blocks
        self.max_blocks.write(slot, most)
        self.end.write(slot, end)
        self.policy.write(slot, POLICY_IDS[request.policy])
        self.steps.write(slot, request.steps)
        numbers = [float(getattr(request, name) or 0) for name in COLUMNS]
        for column, name in enumerate(COLUMNS):
            if params.temperature > 0 and name in GREEDY_FILTERS:
                # vLLM's own filters are in force here.
                numbers[column] = _off(name)
            if numbers[column] != _off(name):
                self.asked.add(name)
        self.numbers.write(slot, numbers)

    def copy_to_device(self) -> None:
        """Copy what was written since the last call to the device."""
        for table in self._tables:
            table.copy_to_device()

    def number(self, name: str, slots: Tensor) -> Tensor:
        """Return one column of `numbers`, float32, for the given slots."""
        return self.numbers.gpu[slots, COLUMNS.index(name)]

    def policies(self, slots_np: np.ndarray) -> set[str]:
        """Return the names of the policies of the given slots."""
        numbers = set(self.policy.np[slots_np].tolist())
        return {POLICY_NAMES[i] for i in numbers}

    def uses(self, name: str, slots_np: np.ndarray) -> bool:
        """Return whether one of the given slots has set an option that is off by default."""
        return name in self.asked and bool(self.users(name, slots_np).any())

    def users(self, name: str, slots_np: np.ndarray) -> np.ndarray:
        """Return which of the given slots have set an option that is off by default, bool."""
        return self.numbers.np[slots_np, COLUMNS.index(name)] != _off(name)

    def refresh_all(self, slots_np: np.ndarray) -> bool:
        """Return whether every refresh of the given slots computes everything from 0."""
        if not self.refreshes_vary:
            return True
        return bool((self.layout(slots_np).full_refresh_every == 1).all())

    def layout(self, slots_np: np.ndarray) -> Layout:
        """Return where forwards of full attention lie, on the host."""
        return Layout(*self.layouts_np[slots_np].T)

    def policy_settings(self, slots_R: Tensor) -> PolicySettings:
        """Return the numbers of the policies for the requests of a step."""
        number, entropy_R, penalty_R = self.number, None, None
        if self.config.method.reorders:
            entropy_R = number("entropy_threshold", slots_R)
            penalty_R = number("position_penalty", slots_R)
        return PolicySettings(
            threshold_R=number("threshold", slots_R),
            factor_R=number("factor", slots_R),
            eps_R=number("eps", slots_R),
            steps_R=self.steps.gpu[slots_R],
            block_length_R=self.block_length.gpu[slots_R],
            entropy_threshold_R=entropy_R,
            position_penalty_R=penalty_R,
            editing_threshold_R=number("editing_threshold", slots_R),
            num_to_transfer_R=number("num_to_transfer", slots_R),
        )


def _off(name: str) -> float:
    """Return the number with which an option that is off by default does nothing."""
    return 1.0 if name in ("top_p", "entropy_temperature") else 0.0


class Templates:
    """Store the given tokens of each slot's answer.

    table   bool ``[N, C]``, by position of the answer; made for the first request with a template
    has_np  bool, whether a slot's request has a template
    tail_start_np  int64, where the text after the last gap begins if a template is longer than
            the canvas, else NO_LIMIT
    tails   that text, by slot
    """

    def __init__(self, canvas_NC: Tensor) -> None:
        self.shape, self.device = canvas_NC.shape, canvas_NC.device
        self.has_np = np.zeros(self.shape[0], dtype=np.bool_)
        self.tail_start_np = np.full(self.shape[0], NO_LIMIT)
        self.tails: dict[int, tuple[int, ...]] = {}
        self.table: SlotTable | None = None

    def add_request(self, slot: int, template: Template | None, end: int) -> None:
        """Stage the template, if any, of a request that starts at `slot`.

        Args:
            end: absolute position where the last gap ends.
        """
        if template is None and not self.has_np[slot]:
            return
        if self.table is None:
            self.table = SlotTable(self.shape, torch.bool, self.device)
        self.has_np[slot] = template is not None
        self.tail_start_np[slot] = NO_LIMIT
        self.tails.pop(slot, None)
        self.table.write(slot, False)
        if template is not None:
            num_positions = self.shape[1]
            ids = np.array(template.token_ids[:num_positions])
            self.table.np[slot, : len(ids)] = ids != FILL
            if len(template.token_ids) > num_positions:
                self.tail_start_np[slot] = end
                self.tails[slot] = template.token_ids[template.end :]

    def forget(self, slot: int) -> None:
        """Drop the text after the last gap of a slot that is free."""
        self.tails.pop(slot, None)
        self.tail_start_np[slot] = NO_LIMIT

    def copy_to_device(self) -> None:
        """Copy what was staged since the last call to the device."""
        if self.table is not None:
            self.table.copy_to_device()

    def given(self, slots_R: Tensor, place_RX: Tensor) -> Tensor:
        """Return which positions of answers are given, bool ``[R, X]``."""
        assert self.table is not None
        last = self.shape[1] - 1
        given_RX = self.table.gpu[slots_R].gather(1, place_RX.clamp(0, last))
        return given_RX & (place_RX >= 0) & (place_RX <= last)

    def next_block_np(
        self, slots_np: np.ndarray, place: np.ndarray, block_length: np.ndarray
    ) -> np.ndarray:
        """Return the start of the first block with a gap, from answer position `place` on."""
        if self.table is None or not self.has_np[slots_np].any():
            return place
        is_gap = ~self.table.np[slots_np]
        is_gap &= np.arange(self.shape[1]) >= place[:, None]
        start = is_gap.argmax(axis=1) // block_length * block_length
        has_gap = self.has_np[slots_np] & is_gap.any(axis=1)
        return np.where(has_gap, start, place)
