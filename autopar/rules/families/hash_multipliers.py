"""Multipliers of the hashes that random numbers are made of, for operators of torch and for Triton's kernels."""

from __future__ import annotations


def _signed(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


SPLITMIX = tuple(_signed(m, 64) for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Multipliers of the 64-bit hash of a row or a column: splitmix64 (Steele, Lea and Flood 2014)."""
MULTIPLIERS = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)
"""Multipliers of the two rounds that mix the hashes of a row and a column (``lowbias32`` of Wellons' hash
prospector)."""
