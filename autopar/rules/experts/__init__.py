"""Routed experts.

========================= =============================================================================================
:mod:`.experts`           products row by row; :mod:`.expert_block`: those that follow from each other, as one operator
:mod:`.expert_program`    what such an operator computes for a row: as text, read, and computed
:mod:`.expert_all_to_all` rows on the way to the ranks of their experts
:mod:`.expert_features`   where tensor parallelism cuts experts; :mod:`.stacked_columns`: gate and up in one matrix
:mod:`.expert_load`       how many rows each gets
:mod:`.expert_by_expert`  on CPUs
========================= =============================================================================================
"""
