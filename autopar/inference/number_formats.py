"""Bytes of a stored number by its format, with its part of a scale, and which formats go together."""

from __future__ import annotations

from autopar.errors import PlanError, closest
from autopar.inference.records import Formats
from hardware_profiles import Device

FORMAT_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.53125}
"""NVFP4 has a scale of one byte for 16 numbers, MXFP4 one for 32, int4 one of two bytes for 64."""
CACHES = ("bf16", "fp8")
COMPUTED_AS = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "bf16", "int4": "bf16"}
"""Format of the activations in products with weights of a format, as engines compute them."""


def formats_of(weights: str, cache: str) -> Formats:
    """Return the formats of a policy: ``--precision`` and ``--cache-precision``.

    Raises:
        PlanError: a format is not known.
    """
    if weights not in FORMAT_BYTES:
        raise PlanError(f"--precision '{weights}' is no format of weights; {closest(weights, list(FORMAT_BYTES))}")
    if cache not in CACHES:
        raise PlanError(f"--cache-precision '{cache}' is no format of a cache; give bf16 or fp8")
    return Formats(weights, COMPUTED_AS[weights], cache)


def note_on_formats(formats: Formats, device: Device) -> str:
    """Say what a device does with products in a format for which it has no rate; empty if it has one."""
    name = {"fp8": "float8", "nvfp4": "float4"}.get(formats.activations)
    if name is None or name in device.peak_flops:
        return ""
    return f"{device.name} has no {formats.activations} products: weights are stored so, and multiplied in bf16"
