"""Memory between forward and backward: what is held, what may be done about it, and how much there is at the fullest.

====================== ================================================================================================
:mod:`.ledger`         what is held from the forward to the backward, why, and how that was decided;
                       :mod:`.memory_walk`: found out, operator by operator, :mod:`.operator_memory`: of each,
                       :mod:`.walked_ledger`: and concluded; :mod:`.fused_chains`: what fused kernels never write
:mod:`.memory_choices` what may be done about it, as strategies of the program; :mod:`.recomputable`: which operators
                       may be recomputed in the backward; :mod:`.recompute`: the segments that are
:mod:`.moments`        what lives at each moment of the :mod:`.microbatch_timeline`; :mod:`.gradient_moments`: of it,
                       gradients; :mod:`.reshard_needs`: what is needed beside a reshard's step
:mod:`.stage_peaks`    the peak of a step, with others in flight: working memory
:mod:`.kept`           in the program: bytes of what autograd keeps; :mod:`.moment_rows`: of what is there at one
                       moment of a step, the rows of the memory limit
:mod:`.contents`       what is in memory tensor by tensor, at the fullest moment and over a microbatch
:mod:`.memory_errors`  what an error says of a plan that does not fit
====================== ================================================================================================
"""
