"""What a part of an update may hold, and what all parts together must."""

import pytest
import torch

from dllm_plugin.models.checkpoints.weights import (
    Manifest,
    WeightUpdate,
    check_updatable,
)

SHAPES = {"a.weight": (2,), "b.weight": (3,), "head.weight": (4,)}
MANIFEST = Manifest(SHAPES, optional=frozenset({"head.weight"}))
A, B, HEAD = ((name, torch.ones(shape)) for name, shape in MANIFEST.shapes.items())


def update(partial: bool, *parts: list[tuple[str, torch.Tensor]]) -> list[str]:
    checks = WeightUpdate(MANIFEST, partial)
    names = [name for part in parts for name, _ in checks.part(part)]
    checks.finish()
    return names


def test_parts_come_in_any_order() -> None:
    assert update(False, [B], [], [HEAD, A]) == ["b.weight", "head.weight", "a.weight"]


def test_missing_weights_are_counted() -> None:
    with pytest.raises(ValueError, match=r"^The update has no weight 'a.weight'\.$"):
        update(False, [B])
    with pytest.raises(
        ValueError, match=r"^The update has no weight 'a.weight' \(and 1 more\)\.$"
    ):
        update(False, [HEAD])


def test_an_empty_update_changes_nothing() -> None:
    assert update(False, []) == []


def test_partial_backends_leave_out_and_repeat() -> None:
    assert update(True, [A], [A]) == ["a.weight", "a.weight"]
    with pytest.raises(
        ValueError, match=r"^Weight 'a.weight' comes twice in one update\.$"
    ):
        update(False, [A], [A])


@pytest.mark.parametrize("partial", [False, True])
def test_wrong_weights_are_named_at_once(partial: bool) -> None:
    with pytest.raises(
        ValueError, match=r"^Weight 'a.weight' in the update has shape \(3,\), but"
    ):
        update(partial, [("a.weight", torch.ones(3))])
    with pytest.raises(
        ValueError, match="^The update holds a weight 'c' that this model does not"
    ):
        update(partial, [("c", torch.ones(3))])


def test_merged_adapters() -> None:
    check_updatable(None, merged=False)
    check_updatable("some/adapter", merged=True)
    with pytest.raises(
        ValueError, match="^Weights cannot be updated in place under lora_path:"
    ):
        check_updatable("some/adapter", merged=False)
