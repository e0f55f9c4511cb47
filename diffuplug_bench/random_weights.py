"""Fill a model with random weights as large as trained ones, in place of vLLM's dummy weights.

vLLM's dummy weights, norms included, are at most 0.001. With them, all masks of a canvas get the
same hidden state, and measurements are too fast. GEMMs of equal rows ran at 865 TFLOP/s in an
engine where GEMMs of random rows reached 667 (benchmarks/reports/h200_steps.md). A mixture of
experts reads only the few experts that all positions are routed to.
"""

import torch

# The uniform distribution within it has the standard deviation of initialised models, 0.02.
BOUND = 0.02 * 3**0.5


def fill(model: torch.nn.Module, seed: int) -> None:
    """Set matrices to uniform numbers within `BOUND`, norms to one and biases to zero.

    In place, because CUDA graphs read these addresses. On a CPU, vLLM has packed most matrices by
    then; those keep its dummy weights.
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
