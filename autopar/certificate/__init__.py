"""Certificates: what a plan claims, recounted from the program that it emits, without the solver and the pricer.

==================  ===================================================================================
``program.py``      collectives, seconds and stored bytes of the emitted program, run on fake tensors
``activations.py``  what autograd holds from the forward to the backward, counted by storage
==================  ===================================================================================
"""

from autopar.certificate.program import Report, check

__all__ = ["Report", "check"]
