"""Rules proved on numbers: every strategy's pieces, joined, are the whole, forward and backward.

================== ====================================================================================================
:mod:`.proof`      of a rule, by its samples
:mod:`.many_ranks` ranks in one process; :mod:`.one_by_one`, :mod:`.simulation`: how they take turns
================== ====================================================================================================
"""
