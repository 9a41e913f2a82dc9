"""Seconds and bytes of products that a policy makes narrow: their rate, and the casts around them.

A narrow product runs at the device's rate for its format. Before it, its activations are cast; in the backward the
gradient of its result is. Software that fuses (Transformer Engine) casts activations once for all products that read
them, and weights once a step where a rank keeps the copies, which is part of what a parameter takes in a step
(:mod:`.parameter_sharding`). Programs of our own cast both for each product and each pass, and keep no copies.
:mod:`autopar.words.narrow_products` has the bytes and their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.words.narrow_products import NarrowFormat, NarrowUse
from cost_models.costs import Costs, OpSeconds, OpWork
from hardware_profiles import Device, is_gpu

SCALE_KERNELS = 6
"""Kernels on a number or a row that find one scale in our own programs."""
DTYPES = {"float8": "float8_e4m3fn", "float4": "float4_e2m1fn"}
"""The dtype of operators by the rate of a data sheet."""


@dataclass(frozen=True)
class LocalProduct:
    """The elements of a product on one rank, and the bytes of a wide one.

    Attributes:
        ins: elements of each input.
        out: elements of the result.
        between: elements of what lies between two products that are one operator, as of experts, and of the gradient of
            what the first of them gives.
        wide: bytes of an element of the activations.
    """

    ins: Sequence[int]
    out: int
    between: tuple[int, int]
    wide: int


def product_seconds(
    costs: Costs, device: Device, work: OpWork, use: NarrowUse, local: LocalProduct, fused: bool
) -> OpSeconds:  # fmt: skip
    """Return the seconds of a narrow product with its casts; ``work`` is that of the same product as wide.

    Args:
        fused: by software that shares casts and keeps those of weights.
    """
    numbers = use.numbers
    check_device(device, use.format, numbers)
    narrow_inputs = sum(local.ins[position] for position in (*use.activations, *use.weights))
    spared = narrow_inputs * (local.wide - numbers.item_bytes)
    narrow = work._replace(
        dtype=DTYPES[numbers.rate] if is_gpu(device) else work.dtype, n_bytes=max(0, round(work.n_bytes - spared)),
        key=lambda: None,
    )  # fmt: skip
    priced = costs.op(device, narrow)
    if numbers.wide_weights and work.differentiable:
        of_weights = costs.op(device, work).weights
        priced = priced._replace(total=priced.total - priced.weights + of_weights, weights=of_weights)
    activations = sum(local.ins[position] for position in use.activations)
    each = numbers.cast_bytes(local.wide)
    cast = activations * each / (use.shared if fused else 1)
    again = scales = 0.0
    if numbers.runs and not fused:
        again = sum(local.ins[position] for position in use.weights) * each
        scales = SCALE_KERNELS * costs.copy(device, 4.0, "float32")
    there = costs.copy(device, cast + again, work.dtype) + 2 * scales
    back = costs.copy(device, local.out * each + again, work.dtype) + scales if work.differentiable else 0.0
    if any(local.between):
        there += costs.copy(device, local.between[0] * each, work.dtype)
        back += costs.copy(device, local.between[1] * each, work.dtype) if work.differentiable else 0.0
    return priced._replace(forward=priced.forward + there, total=priced.total + there + back)


def check_device(device: Device, name: str, numbers: NarrowFormat) -> None:
    """Refuse products that a device's cores do not have; processors multiply such numbers in float32."""
    if numbers.needs not in device.peak_flops and (is_gpu(device) or not numbers.runs):
        has = ", ".join(device.peak_flops)
        raise PlanError(
            f"products in {name} need cores with a rate for {numbers.needs}, and {device.name} has rates for {has}: "
            "take another precision, such as bf16-mixed, or other devices"
        )
