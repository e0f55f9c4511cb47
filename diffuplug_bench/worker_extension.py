"""Add the benchmark's methods to an engine's workers, by vLLM's `worker_extension_cls`.

vLLM's dummy weights, norms included, are at most 0.001. With them, all masks of a canvas get the
same hidden state, and measurements are too fast: GEMMs of equal rows ran at 865 TFLOP/s in an
engine where GEMMs of random rows reached 667 (benchmarks/reports/h200_steps.md), and a mixture of
experts reads only the few experts that all positions are routed to. So weights become random, and
masks are accepted by random numbers, as confidences of random weights mean nothing.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm import LLM

    from diffuplug_bench.step.floor import Times
    from dllm_plugin.decoding.plan import AcceptFunction, Canvas, Proposal, StepPlan
    from dllm_plugin.decoding.policies import PolicySettings, Rule

# The uniform distribution within it has the standard deviation of initialised models, 0.02.
BOUND = 0.02 * 3**0.5
# Endings of the names of stored weights (`w13_weight` of experts), and each dtype's largest number:
# 32 bits pack eight numbers of four bits, 8 bits without a sign two of float4.
WEIGHTS = ("weight", "weight_packed", "qweight")
LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.int8: 127.0,
    torch.int32: 8.0,
    torch.uint8: 6.0,
}
INTEGERS = {
    torch.int8: (-127, 128),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.uint8: (0, 256),
}
ROWS = 8192  # of float8 numbers that are drawn at once
EXPONENT_BIAS = 127


class BenchWorker:
    """Extend the worker of every rank; its own methods have other names."""

    device: torch.device
    get_model: Any
    model_runner: Any
    share: Tensor | None = None  # the probability that a draft is accepted

    def fill_weights(self, seed: int) -> None:
        """Fill the model; same seed on all ranks, as some weights (routers) are replicated."""
        fill(self.get_model(), seed)

    def accept(self, p0: float, lam: float, seed: int) -> None:
        """Accept masks by random numbers, the same on all ranks, in place of confidences."""
        decider = self.model_runner.model_state.sampler.decider
        decider.policy_rules["threshold"] = random_rule(p0, lam, seed, self.device)
        decider.forget()

    def accept_drafts(self, share: float, seed: int) -> None:
        """Accept each draft with a probability, in place of what the model predicts."""
        decider = self.model_runner.model_state.sampler.decider
        method = self.model_runner.model_state.config.method
        if self.share is None:
            self.share = torch.zeros((), device=self.device)
            if method.accept is None:  # a window, whose masks take their tokens
                rule = random_run(self.share, seed)
                decider.policy_rules[method.default_policy] = rule
            else:
                decider.accept = random_accept(method.accept, self.share, seed)
            decider.forget()
        self.share.fill_(share)

    def reset_peak_bytes(self) -> int:
        """Reset the peak of allocated memory and return what is allocated now. CUDA only."""
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def time_steps(
        self, requests: list[int], widths: list[int], contexts: list[int]
    ) -> list[tuple[int, int, int, float]]:
        """Return (requests, width, context of each, ms) of every combination that fits a step."""
        from diffuplug_bench.adaptive.uniform_steps import time_steps

        return time_steps(self.model_runner, requests, widths, contexts)

    def time_gemms(self, positions: list[int], most: tuple[int, int] | None) -> "Times":
        """Return the times of the GEMMs of this rank's model, as of `floor.time_gemms`."""
        from diffuplug_bench.step.engine_gemms import time_model
        from diffuplug_bench.step.floor import Wanted

        return time_model(self.get_model(), Wanted(tuple(positions), most))

    def peak_bytes(self) -> int:
        """Return the peak of allocated memory since `reset_peak_bytes`."""
        return torch.cuda.max_memory_allocated(self.device)


EXTENSION = f"{__name__}.{BenchWorker.__name__}"


def fill_weights(llm: "LLM", seed: int) -> None:
    """Fill the model on all ranks of an engine that was started with `EXTENSION`."""
    llm.collective_rpc("fill_weights", args=(seed,))


def fill(model: torch.nn.Module, seed: int) -> None:
    """Set matrices to uniform numbers within `BOUND`, norms to one and biases to zero.

    Quantised matrices become random within their range, with the scales that make them such
    numbers. In place, because CUDA graphs read these addresses. On a CPU, vLLM has packed most
    matrices by then; those keep its dummy weights.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for layer in model.modules():
            own = dict(layer.named_parameters(recurse=False))
            stored = [own[name].dtype for name in own if name.endswith(WEIGHTS)]
            largest = LARGEST.get(stored[0]) if stored else None
            for name, parameter in own.items():
                _fill_one(name, parameter, largest, generator)


def _fill_one(
    name: str, parameter: Tensor, largest: float | None, generator: torch.Generator
) -> None:
    """Fill a parameter of a layer whose stored weights are at most `largest`, if quantised."""
    if name.endswith("bias"):
        parameter.zero_()
    elif "scale" in name:
        if largest is not None:
            _fill_scale(parameter, BOUND / largest)
    elif not parameter.is_floating_point():
        if name.endswith(WEIGHTS):
            parameter.random_(*INTEGERS[parameter.dtype], generator=generator)
    elif parameter.dtype == torch.float8_e4m3fn:
        assert largest is not None
        for rows in parameter.split(ROWS):
            values = torch.empty(rows.shape, device=rows.device)
            rows.copy_(values.uniform_(-largest, largest, generator=generator))
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.uniform_(-BOUND, BOUND, generator=generator)


def _fill_scale(scales: Tensor, value: float) -> None:
    """Set scales to a number; those of one byte are powers of two, stored as exponents."""
    if scales.element_size() == 1:
        scales.view(torch.uint8).fill_(EXPONENT_BIAS + round(math.log2(value)))
    else:
        scales.fill_(value)


def random_rule(p0: float, lam: float, seed: int, device: torch.device) -> "Rule":
    """Return a policy that accepts the k-th mask with probability ``p0 exp(-k / lam)``.

    :mod:`dllm_plugin.decoding.acceptance` describes it. If no mask is accepted, the first is.
    """

    def take(candidates_RC: Tensor, rank_RC: Tensor, drawn_RC: Tensor) -> Tensor:
        accepted_RC = candidates_RC & (drawn_RC < p0 * torch.exp(-rank_RC / lam))
        stuck_R1 = ~accepted_RC.any(dim=1, keepdim=True)
        return accepted_RC | (candidates_RC & (rank_RC == 0) & stuck_R1)

    return _drawing(take, seed, device)


def random_run(share: Tensor, seed: int) -> "Rule":
    """Return a policy that accepts the first mask, and masks after it while draws are below."""

    def take(candidates_RC: Tensor, rank_RC: Tensor, drawn_RC: Tensor) -> Tensor:
        stops_RC = candidates_RC & (rank_RC > 0) & (drawn_RC >= share)
        return candidates_RC & (stops_RC.cumsum(dim=1) == 0)

    return _drawing(take, seed, share.device)


def _drawing(
    take: Callable[[Tensor, Tensor, Tensor], Tensor], seed: int, device: torch.device
) -> "Rule":
    """Return a policy that takes masks by their rank among the masks and drawn numbers."""
    calls = torch.full((), seed, dtype=torch.int64, device=device)

    def rule(
        plan: "StepPlan",
        canvas: "Canvas",
        proposal: "Proposal",
        settings: "PolicySettings",
    ) -> Tensor:
        rank_RC = plan.candidates_RC.cumsum(dim=1) - 1
        taken_RC = take(plan.candidates_RC, rank_RC, _uniform(calls, rank_RC))
        calls.add_(1)
        return taken_RC

    return rule


def random_accept(
    accept: "AcceptFunction", share: Tensor, seed: int
) -> "AcceptFunction":
    """Return `accept` on proposals that equal the drafts with a probability."""
    calls = torch.full((), seed, dtype=torch.int64, device=share.device)

    def judge(
        canvas: "Canvas",
        plan: "StepPlan",
        unmask_RC: Tensor,
        proposal: "Proposal",
        mask_id: int,
    ) -> Any:
        drafts_RC = canvas.tokens_RC
        equal_RC = _uniform(calls, drafts_RC) < share
        calls.add_(1)
        other_RC = (drafts_RC - 1).abs()
        other_RC = torch.where(other_RC == mask_id, mask_id - 1, other_RC)
        judged_RC = torch.where(equal_RC, drafts_RC, other_RC)
        token_RC = torch.where(drafts_RC == mask_id, proposal.token_RC, judged_RC)
        return accept(
            canvas, plan, unmask_RC, proposal._replace(token_RC=token_RC), mask_id
        )

    return judge


def _uniform(calls: Tensor, like_RC: Tensor) -> Tensor:
    """Return a number in [0, 1) for every place: a hash, which compiled steps hold as well."""
    place = torch.arange(like_RC.numel(), device=like_RC.device).view_as(like_RC)
    mixed = calls * 1_000_003 + place
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).to(torch.float32) / 2**32
