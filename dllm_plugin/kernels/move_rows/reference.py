"""Copy logits rows into rows kept per slot: the plain-torch reference implementation."""

import torch
from torch import Tensor


def move_rows(
    from_TV: Tensor, from_R: Tensor, to_NV: Tensor, slots_R: Tensor, moved_R: Tensor
) -> None:
    """Copy row `from_R` of `from_TV` to row `slots_R` of `to_NV`, where `moved_R` is true."""
    new_RV, old_RV = from_TV[from_R].to(to_NV.dtype), to_NV[slots_R]
    to_NV[slots_R] = torch.where(moved_R[:, None], new_RV, old_RV)
