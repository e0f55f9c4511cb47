"""Canvases, plans and settings made by hand, all requests alike unless told otherwise."""

from typing import Any

import torch
from torch import Tensor

from dllm_plugin.decoding.block_causal import commit_blocks, final_run
from dllm_plugin.decoding.plan import Canvas, StepOutcome, StepPlan
from dllm_plugin.decoding.policies import PolicySettings

MASK = 15


def canvas(
    num_requests: int,
    num_positions: int,
    block_length: int | None = None,
    full: Any = True,
    tokens: Any = 0,
    step: Any = 0,
    **fields: Any,
) -> Canvas:
    """A canvas whose blocks are all open and computed; `fields` by the names of :class:`Canvas`."""
    length = block_length or num_positions
    num_slots = -(-num_positions // length)
    low_S = torch.arange(num_slots) * length
    size_S = (num_positions - low_S).clamp_max(length).to(torch.int32)
    none_R = torch.zeros(num_requests, dtype=torch.int32)
    made = Canvas(
        tokens_RC=torch.tensor(tokens).expand(num_requests, num_positions),
        size_RS=size_S.expand(num_requests, -1),
        computed_RS=torch.ones(num_requests, num_slots, dtype=torch.bool),
        block_RC=(torch.arange(num_positions) // length).expand(num_requests, -1),
        open_R=none_R + num_slots,
        full_RS=torch.tensor(full).expand(num_requests, num_slots),
        saw_stop_R=none_R.bool(),
        ended_R=none_R.bool(),
        step_R=torch.tensor(step, dtype=torch.int32).expand(num_requests),
        block_add_threshold_R=none_R.float(),
        decoded_token_threshold_R=none_R.float(),
        max_active_R=none_R.float() + 1,
        sub_length_R=none_R.to(torch.int64),
        tail_R=none_R,
        edits_R=none_R.bool(),
        edits_left_R=none_R.float(),
    )
    return made._replace(
        **{
            name: torch.tensor(value).expand_as(getattr(made, name))
            for name, value in fields.items()
        }
    )


def plan(canvas: Canvas, candidates_RC: Tensor, **fields: Any) -> StepPlan:
    """A plan under which every block is active; `fields` by the names of :class:`StepPlan`."""
    none_R = torch.zeros_like(canvas.open_R)
    made = StepPlan(
        open_R=canvas.open_R,
        active_RS=canvas.size_RS > 0,
        full_RS=canvas.full_RS,
        candidates_RC=candidates_RC,
        num_stored_R=none_R.to(torch.int64),
        num_committed_R=none_R,
        first_only_R=none_R.bool(),
        editable_RC=torch.zeros_like(candidates_RC),
        checks_R=none_R.bool(),
        fixed_R=torch.full_like(canvas.block_RC[:, 0], candidates_RC.shape[1]),
    )
    return made._replace(
        **{
            name: torch.tensor(value).expand_as(getattr(made, name))
            for name, value in fields.items()
        }
    )


def committed(
    canvas: Canvas,
    plan: StepPlan,
    unmask_RC: Tensor,
    tokens_RC: Tensor,
    is_stop_RC: Tensor,
    remaining_R: Tensor,
) -> StepOutcome:
    """What a step commits of blocks."""
    ends = final_run(canvas, plan, tokens_RC, is_stop_RC, remaining_R, MASK)
    return commit_blocks(canvas, plan, unmask_RC, *ends)


def settings(
    canvas: Canvas,
    steps: Any = 1,
    threshold: float = 0.9,
    factor: float = 1.0,
    eps: float = 1e-3,
    editing_threshold: float = 0.5,
    num_to_transfer: int = 1,
    entropy_threshold: float = 0.4,
    position_penalty: float = 0.02,
) -> PolicySettings:
    """Numbers of policies; a whole block is as long as the first one of the canvas."""
    one_R = torch.ones(len(canvas.open_R))
    return PolicySettings(
        threshold_R=one_R * threshold,
        factor_R=one_R * factor,
        eps_R=one_R * eps,
        steps_R=torch.tensor(steps, dtype=torch.int32).expand(len(one_R)),
        block_length_R=canvas.size_RS[:, 0].to(torch.int64),
        editing_threshold_R=one_R * editing_threshold,
        num_to_transfer_R=one_R * num_to_transfer,
        entropy_threshold_R=one_R * entropy_threshold,
        position_penalty_R=one_R * position_penalty,
    )
