"""Sharding rules: importing this package registers one rule per operator, family by family.

===================== =================================================================================================
:mod:`.notation`      a rule: its line and its factors, distributed lowerings of a factor; :mod:`.terms`: lines, read
                      and matched with shapes; :mod:`.operator_call`: one use of an operator, as rules see it
options               :mod:`.axis_options`: what an operator may do on one axis, as it follows from its rule;
                      :mod:`.option_names`: how it is called
:mod:`.registry`      rules by operator; :mod:`.strategy`: what one operator does on all axes of a mesh
:mod:`.block_units`   into which uneven blocks operators may be cut, because others want such pieces
:mod:`.local_calls`   the call that one rank makes; :mod:`.lowering_helpers`: what distributed lowerings share
:mod:`.saved_tensors` what autograd keeps of a call; :mod:`.aliasing`: whether its result is memory of its own;
                      :mod:`.working_memory`: what a call needs while it runs; :mod:`.kernels`: on which device
:mod:`.operator_work` what a device computes and moves for one operator, as cost models count it
operators             :mod:`.families`, :mod:`.attention`, :mod:`.experts`; :mod:`.function`: a user's own backward
not written           :mod:`.discovery`: rules that are found by trying an operator
on numbers            :mod:`.proving`; :mod:`.whole_tensors`: a graph run as it stands
===================== =================================================================================================
"""

from __future__ import annotations

import importlib

FAMILIES = (
    "families.pointwise", "families.shape", "families.image", "families.reduce", "families.histogram",
    "families.factory", "families.index", "families.contraction", "families.narrow_linear", "families.conv",
    "families.pool", "attention.attention", "families.norm", "families.loss", "families.embedding",
    "families.recurrences", "families.ctc", "experts.experts", "experts.expert_block", "families.sharded_random",
    "families.random_distributions", "families.multinomial", "families.seeded_number", "families.value_without_history",
    "families.branch", "discovery",
)  # fmt: skip

for _family in FAMILIES:
    importlib.import_module(f"autopar.rules.{_family}")
