"""Random weights of the size that models have, in place of vLLM's dummy ones.

Those are a thousandth at most, norms included. Under them all masks of a canvas come to the same
hidden state. Products of rows that are alike seem to be faster than a model's (865 TFLOP/s in an
engine where the floor's random rows had 667, benchmarks/reports/h200_steps.md), and a mixture of
experts reads the few experts that all of them are routed to.
"""

import torch

# Of a uniform distribution with the deviation 0.02, which models are initialised with.
BOUND = 0.02 * 3**0.5


def fill(model: torch.nn.Module, seed: int) -> None:
    """Matrices uniform within `BOUND`, norms one, biases zero; in place, as graphs read them.

    Of floating-point weights. On a CPU vLLM has packed most matrices by now: those keep its own.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-BOUND, BOUND, generator=generator)
