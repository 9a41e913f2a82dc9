"""Certificates: the claims of a plan, recounted from the program that it emits, without solver and pricer.

========================  ==========================================================================================
``recount.py``            the check: seconds, collectives and stored bytes of the emitted program, and of the plan
``microbatch_run.py``     one microbatch of it, and what is communicated beside computation; ``priced_run.py``: on fake
                          tensors, every collective counted, every operator priced
``stored_parameters.py``  bytes of parameters, and seconds between where they are stored and where they are used
``beside_operators.py``   seconds of sums of gradients, and of what is done once a step
``activations.py``        memory that autograd keeps from the forward to the backward, counted by storage
``peak.py``               the most memory that lives at once in a training step, allocation by allocation
========================  ==========================================================================================
"""

from autopar.certificate.peak import Peak, has_backward, in_pipeline, over_limit, peak_of
from autopar.certificate.recount import Report, check

__all__ = ["Peak", "Report", "check", "has_backward", "in_pipeline", "over_limit", "peak_of"]
