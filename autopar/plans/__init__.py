"""A plan as a value, what may be asked of one, and what it speaks of.

The plan

======================== ==============================================================================================
:mod:`.plan`             stages, schedule, crossings: every decision; :mod:`.plan_table`: in a notebook
:mod:`.device_groups`    where its stages run; :mod:`.stage_graphs`: a graph cut into their graphs
:mod:`.transfer`         what crosses between them: which rank sends which piece to which rank
:mod:`.memory_decisions` what is done about memory between forward and backward; :mod:`.regather`: which tensors are
                         gathered or made again, or let wait
:mod:`.prices`           what a stage is predicted to cost: seconds and bytes
======================== ==============================================================================================

What is asked

================ ======================================================================================================
:mod:`.plan_options`   what may be asked: one record for each wish; :mod:`.request`: from a call's arguments to a search
:mod:`.clusters` on which hardware; :mod:`.detection`: which that is, from what the ranks say
================ ======================================================================================================
"""
