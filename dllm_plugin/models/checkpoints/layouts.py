"""Check the tensors of weights that a checkpoint stores quantised: all there, each with its shape.

vLLM fills what it finds: of a module without its scale it multiplies by whatever the memory held.
N outputs and K inputs of a matrix; `bits` of a packed number, `group` of inputs that share a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
# Formats whose tensors have one layout each; of others only a missing scale is found.
KNOWN = ("compressed-tensors", "fp8", "fbgemm_fp8", "gptq", "awq")
WORD = 32  # bits of an integer into which numbers are packed
ONE = {(), (1,)}  # shapes of a single number
# The tensor that has a module's numbers, by which its other tensors are known.
MAINS = ("weight_packed", "qweight", "weight")
SCALES = ("weight_scale", "weight_scale_inv")
ALL = -1  # as a group: all inputs share a scale


@dataclass(frozen=True)
class Packing:
    """List what a `quantization_config` says of stored tensors.

    method   vLLM's name of the format's family
    main     the tensor that has a quantised module's numbers, if all modules are stored alike
    bits     of a number, of any module
    groups   inputs that share a scale, of any module
    blocks   (outputs, inputs) that share a scale, in formats with such
    inputs   activations are scaled by a stored number
    ordered  inputs are in an order of their own, which is stored
    """

    method: str
    main: str
    bits: frozenset[int]
    groups: frozenset[int]
    blocks: frozenset[tuple[int, int]] = frozenset()
    inputs: bool = False
    ordered: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Packing":
        """Read a checkpoint's `quantization_config`."""
        method = str(config.get("quant_method", ""))
        if method == "compressed-tensors":
            return _compressed(config)
        packed = method in ("gptq", "awq")
        bits = config.get("bits") or config.get("w_bit")
        group = config.get("group_size") or config.get("q_group_size")
        blocks = config.get("weight_block_size")
        return cls(
            method,
            "qweight" if packed else "weight",
            frozenset({int(bits or 4)}),
            frozenset({int(group or ALL)}),
            frozenset({(blocks[0], blocks[1])} if blocks else ()),
            inputs=config.get("activation_scheme") == "static",
            ordered=bool(config.get("desc_act")),
        )


def _compressed(config: Mapping[str, Any]) -> Packing:
    """Read the groups of a compressed-tensors config, which may differ in their formats."""
    bits, groups, blocks = set(), set(), set()
    inputs, formats = False, {config.get("format")}
    for group in config.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        formats.add(group.get("format") or config.get("format"))
        bits.add(int(weights.get("num_bits") or 8))
        groups.add(int(weights.get("group_size") or ALL))
        if weights.get("block_structure"):
            blocks.add(tuple(weights["block_structure"]))
        activations = group.get("input_activations") or {}
        inputs |= activations.get("dynamic") is False
    alike = len(formats) == 1
    packed = alike and "pack" in str(config.get("format"))
    main = "weight_packed" if packed else "weight"
    return Packing(
        "compressed-tensors",
        main if alike else "",
        frozenset(bits),
        frozenset(groups),
        frozenset(blocks),
        inputs=alike and len(config["config_groups"]) == 1 and inputs,
    )


def shapes_of(
    packing: Packing, suffix: str, dtype: torch.dtype, matrix: Shape
) -> set[Shape] | None:
    """Return the shapes that a tensor of a module may have; None if any will do.

    Args:
        suffix: the tensor's name within the module.
        matrix: ``(N, K)``, the shape of the unquantised weight.
    """
    outputs, inputs = matrix
    if suffix == "weight" and dtype in EIGHT_BITS:
        return {matrix}
    if packing.method not in KNOWN:
        return None
    if suffix in ("weight", "weight_packed") and dtype == torch.uint8:
        return {(outputs, inputs // 2)}
    packed_in = {_packed(inputs, bits) for bits in packing.bits}
    packed_out = {_packed(outputs, bits) for bits in packing.bits}
    rows = {_groups(inputs, group) for group in packing.groups}
    if suffix == "weight_packed":
        return {(outputs, words) for words in packed_in}
    if suffix == "qweight" and packing.method == "awq":
        return {(inputs, words) for words in packed_out}
    if suffix == "qweight":
        return {(words, outputs) for words in packed_in}
    if suffix == "scales":
        return {(count, outputs) for count in rows}
    if suffix == "qzeros":
        return {(count, words) for count in rows for words in packed_out}
    if suffix == "g_idx":
        return {(inputs,)}
    if suffix == "weight_shape":
        return {(2,)}
    if suffix in SCALES and dtype.is_floating_point and dtype.itemsize > 1:
        found = ONE | {(outputs,)} | {(outputs, count) for count in rows | {1}}
        for block in packing.blocks:
            found.add((-(-outputs // block[0]), -(-inputs // block[1])))
        return found
    return ONE if suffix == "input_scale" else None


def _packed(count: int, bits: int) -> int:
    """Return the words that so many numbers are packed into."""
    return -(-count * bits // WORD)


def _groups(inputs: int, group: int) -> int:
    return 1 if group == ALL else -(-inputs // group)


def missing_of(packing: Packing, tensors: Mapping[str, torch.dtype]) -> str | None:
    """Return the first tensor that a quantised module lacks, by its name within the module."""
    mains = [name for name in MAINS if name in tensors]
    if not mains:
        return packing.main or "weight"
    return next(iter(_needed(packing, mains[0], tensors) - set(tensors)), None)


def _needed(
    packing: Packing, main: str, tensors: Mapping[str, torch.dtype]
) -> set[str]:
    """Return the tensors that belong to the one with the module's numbers."""
    if packing.method not in KNOWN and main != "weight":
        return set()
    if main == "qweight":
        return {"scales", "qzeros", *(("g_idx",) if packing.ordered else ())}
    if main == "weight_packed":
        extra = "weight_shape" if tensors[main] == torch.int32 else "weight_scale"
        return {"weight_scale", extra}
    if any(name in tensors for name in SCALES):
        return {"input_scale"} if packing.inputs else set()
    return {SCALES[bool(packing.blocks) and packing.method == "fp8"]}
