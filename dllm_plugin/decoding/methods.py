"""Tables."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from dllm_plugin.decoding.block_causal import plan_block_diffusion, plan_d2f, settle_blocks
from dllm_plugin.decoding.full_attention import (
    Bounds,
    Span,
    plan_current_block,
    settle_refreshed,
    settle_uncached,
    span_dual_cache,
    span_prefix_cache,
    span_semi_autoregressive,
)
from dllm_plugin.decoding.plan import Canvas, StepOutcome, StepPlan

PlanFunction = Callable[[Canvas, int], StepPlan]


SettleFunction = Callable[[Canvas, StepPlan, Tensor, Tensor, Tensor, Tensor, int], StepOutcome]


SpanFunction = Callable[[Bounds, np.ndarray], Span]


STRATEGIES: dict[str, tuple[PlanFunction, SettleFunction]] = {
    "d2f": (plan_d2f, settle_blocks),
    "block_diffusion": (plan_block_diffusion, settle_blocks),
    "semi_autoregressive": (plan_current_block, settle_uncached),
    "prefix_cache": (plan_current_block, settle_refreshed),
    "dual_cache": (plan_current_block, settle_refreshed),
}


SPANS: dict[str, SpanFunction] = {
    "semi_autoregressive": span_semi_autoregressive,
    "prefix_cache": span_prefix_cache,
    "dual_cache": span_dual_cache,
}
