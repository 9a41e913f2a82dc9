"""Certificates: the claims of a plan, recounted from the program that it emits, without solver and pricer.

==================  ================================================================================================
``recount.py``      the check: seconds, collectives and stored bytes of the emitted program, compared with the plan
``priced_run.py``   its run on fake tensors: every collective counted, every operator priced
``activations.py``  memory that autograd keeps from the forward to the backward, counted by storage
``peak.py``         the most memory that lives at once in a training step, allocation by allocation
==================  ================================================================================================
"""

from autopar.certificate.peak import Peak, has_backward, in_pipeline, over_limit, peak_of
from autopar.certificate.recount import Report, check

__all__ = ["Peak", "Report", "check", "has_backward", "in_pipeline", "over_limit", "peak_of"]
