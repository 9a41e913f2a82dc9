"""Formats of numbers that a policy of precision names, and which go together."""

from __future__ import annotations

from autopar.errors import PlanError, closest
from autopar.serving.records import Formats
from hardware_profiles import Device

CACHES = ("bf16", "fp8")
COMPUTED_AS = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "bf16", "int4": "bf16"}
"""Format of the activations in products with weights of a format, as engines compute them."""


def formats_of(weights: str, cache: str) -> Formats:
    """Return the formats of a policy: ``--precision`` and ``--cache-precision``.

    Raises:
        PlanError: a format is not known.
    """
    if weights not in COMPUTED_AS:
        raise PlanError(f"--precision '{weights}' is no format of weights; {closest(weights, list(COMPUTED_AS))}")
    if cache not in CACHES:
        raise PlanError(f"--cache-precision '{cache}' is no format of a cache; give bf16 or fp8")
    return Formats(weights, COMPUTED_AS[weights], cache)


def note_on_formats(formats: Formats, device: Device) -> str:
    """Say what a device does with products in a format for which it has no rate; empty if it has one."""
    name = {"fp8": "float8", "nvfp4": "float4"}.get(formats.activations)
    if name is None or name in device.peak_flops:
        return ""
    return f"{device.name} has no {formats.activations} products: weights are stored so, and multiplied in bf16"
