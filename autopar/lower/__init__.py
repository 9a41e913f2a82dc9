"""Lowering: a graph and a plan become one program for all ranks, of local operators and explicit collectives.

============================= =========================================================================================
:mod:`.emit`                  the lowering itself: every node as a local operator, every reshard step as a collective
:mod:`.program`               its result, with its text
:mod:`.collectives`           the collectives that programs call
:mod:`.segments`              segments that are recomputed in the backward
:mod:`.regather`              copies that are regathered there; :mod:`.freed_tensors`: memory that is freed until then
:mod:`.offloaded`             results that wait in the memory of the host; :mod:`.host_copies`: copies beside compute
:mod:`.overlapped_reductions` sums of gradients that overlap the computation of a weight's gradient
:mod:`.steps`                 forward and backward of a program as one explicit graph, for compilers and recordings
:mod:`.typecheck`             a check of programs by the type checker of ``spmd_types``
============================= =========================================================================================

Rules decide how one operator is cut, and which local call it becomes (:mod:`autopar.rules`).
"""
