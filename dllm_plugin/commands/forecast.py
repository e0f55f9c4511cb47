"""Forecast the width that a load would choose, and its speed; nothing is run."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dllm_plugin.config.options import Options
from dllm_plugin.decoding.acceptance import tokens_per_forward
from dllm_plugin.decoding.step_costs import MeasuredCosts, StepCosts
from dllm_plugin.decoding.widths import WidthController, choose, widths_between

from .options import flag_of, given

if TYPE_CHECKING:  # which imports vLLM
    from dllm_plugin.config.decode import DecodeConfig

EXAMPLE, CONTEXT = "0.9:2.5", 1024
WINDOWS = ("min_window", "max_window")
OPTIONS = ("adaptive", *WINDOWS, "canvas_length")  # of decoding, that only `doctor` has


class Load(NamedTuple):
    """The load of a forecast.

    context  tokens of each request
    p0, lam  acceptance, see :mod:`dllm_plugin.decoding.acceptance`
    step_ms  time of a small step; None: not known
    """

    requests: int
    context: int
    p0: float
    lam: float
    step_ms: float | None = None


def read_load(args: argparse.Namespace) -> Load | None:
    """Return the load that a command names, if any. Raises ValueError naming what is wrong."""
    if args.requests is None:
        for name in given(args, ("context", "acceptance", "step_ms")):
            raise ValueError(f"{flag_of(name)} needs --requests")
        return None
    if args.step_ms is not None and not 0 < args.step_ms <= 1e6:
        raise ValueError(
            f"--step-ms must be a time in milliseconds, got {args.step_ms}"
        )
    p0, lam = read_acceptance(EXAMPLE if args.acceptance is None else args.acceptance)
    return Load(args.requests, args.context or CONTEXT, p0, lam, args.step_ms)


def with_widths(args: argparse.Namespace, dllm: dict[str, Any]) -> dict[str, Any]:
    """Return decode options with those of widths. Raises ValueError naming what is wrong.

    With a load and a window `adaptive` is on.
    """
    options = given(args, OPTIONS)
    asks = args.requests is not None
    if asks and options.get("adaptive") == "off":
        raise ValueError(
            "--requests asks which width load would choose, and --adaptive off has none: leave one "
            "of them out"
        )
    if asks and given(args, WINDOWS):
        options.setdefault("adaptive", "throughput")
    Options.from_user(dllm | options)
    return dllm | options


def read_acceptance(text: str) -> tuple[float, float]:
    """Return p0 and lambda of ``0.9:2.5``. Raises ValueError."""
    try:
        p0, lam = (float(word) for word in text.split(":"))
    except ValueError:
        p0 = lam = 0.0
    if not (0 < p0 <= 1 and 0 < lam <= 1000):
        raise ValueError(
            "--acceptance must be the share of first masks that are accepted and how fast it "
            f"falls, as in {EXAMPLE}, got {text!r}"
        )
    return p0, lam


class Forecast(NamedTuple):
    """The width and the speed that a load would get.

    tokens    of a request, in a forward
    rate      tokens of all requests in the time of a step of few positions, or in a ms
    widest    the same at the widest window
    measured  whether steps were measured on this machine
    """

    width: int
    tokens: float
    rate: float
    widest: float
    measured: bool = False


def forecast(
    config: "DecodeConfig",
    load: Load,
    costs: StepCosts,
    allowed: Mapping[int, Sequence[bool]] | None = None,
) -> Forecast:
    """Return what the controller would choose once it had learned this acceptance."""
    shift = config.family.logits_shift
    widths = widths_between(config.min_window, config.max_window)
    controller = WidthController(
        widths, shift, costs, config.adaptive == "balanced", allowed
    )
    tokens = np.array([tokens_per_forward(w, load.p0, load.lam, shift) for w in widths])
    times = [costs.step(load.requests, w, load.requests * load.context) for w in widths]
    rates = load.requests * tokens / np.array(times)
    may_be_chosen = np.where(controller.may(load.requests), rates, 0.0)
    place = choose(may_be_chosen, None, controller.balanced)
    measured = isinstance(costs, MeasuredCosts)
    brings = float(tokens[place]), float(rates[place]), float(rates[-1])
    return Forecast(widths[place], *brings, measured)
