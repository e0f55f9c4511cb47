"""Count what an object holds, for tests that nothing grows with the number of requests."""

import gc
import sys
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

SHARED = (type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device)


class Held(NamedTuple):
    """Objects that can be reached, and their bytes; of tensors those of their storage."""

    objects: int
    num_bytes: int


def held(root: Any, *without: Any) -> Held:
    """Walk everything that `root` refers to, but not through `without`."""
    seen, found = {id(one) for one in without}, Held(0, 0)
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, SHARED):
            continue
        seen.add(id(one))
        size = sys.getsizeof(one)
        if isinstance(one, torch.Tensor):
            size = one.untyped_storage().nbytes()
        else:
            todo += gc.get_referents(one)
        found = Held(found.objects + 1, found.num_bytes + size)
    return found
