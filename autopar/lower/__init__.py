"""Lowering: a graph and a plan become one program for all ranks, of local operators and explicit collectives.

============================= =========================================================================================
:mod:`.emit`                  the lowering itself: every node as a local operator, every step of a reshard as a
                              collective
:mod:`.program`               what comes of it, and its text
:mod:`.collectives`           the collectives that programs call
:mod:`.segments`              parts that run again in the backward
:mod:`.regather`              copies that are gathered again there; :mod:`.freed_tensors`: memory that is given up
                              until then
:mod:`.overlapped_reductions` sums of gradients that travel while the gradient of a weight is computed
:mod:`.compilable`            the program for torch.compile: one graph, forward and backward
:mod:`.typecheck`             every program is checked by the type checker of ``spmd_types``
============================= =========================================================================================

How one operator is cut, and by which local call, is a rule's business (:mod:`autopar.rules`).
"""
