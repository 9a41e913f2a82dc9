"""Sharding rules: importing this package registers one rule per operator, family by family.

================ ======================================================================================================
:mod:`.notation` a rule: its line and its factors, distributed lowerings of a factor; :mod:`.terms`: lines, read and
                 matched with shapes; :mod:`.operator_call`: one use of an operator, as rules see it
options          :mod:`.axis_options`: what an operator may do on one axis, as it follows from its rule;
                 :mod:`.option_names`: how it is called
:mod:`.registry` rules by operator; :mod:`.strategy`: what one operator does on all axes of a mesh
:mod:`.units`    into which uneven blocks operators may be cut, because others want such pieces
:mod:`.local`    the call that one rank makes; :mod:`.distributed`: what distributed lowerings share;
                 :mod:`.lowering_trial`: where they run without ranks, or are counted; :mod:`.meanwhile`: what runs
                 while collectives of others are under way
:mod:`.saved`    what autograd keeps of a call; :mod:`.aliasing`: whether its result is memory of its own;
                 :mod:`.needs`: what a call needs while it runs
families         :mod:`.pointwise`, :mod:`.shape`, :mod:`.image`, :mod:`.reduce`, :mod:`.factory`, :mod:`.index`,
                 :mod:`.contraction`, :mod:`.conv`, :mod:`.pool`, :mod:`.attention`, :mod:`.attention_in_blocks`
                 (with dropout), :mod:`.norm`, :mod:`.batch_norm_across` (over several ranks), :mod:`.loss`,
                 :mod:`.embed`, :mod:`.recurrences`, :mod:`.ctc`, :mod:`.experts`, :mod:`.expert_block`;
                 :mod:`.expert_features`: where tensor parallelism cuts experts, :mod:`.stacked_columns`: and gate
                 and up projections in one matrix; :mod:`.travelling`: rows on the way to experts;
                 :mod:`.expert_load`: how many each expert gets; :mod:`.expert_by_expert`: on CPUs
on GPUs          :mod:`.attention_on_gpus`: which attention with dropout has kernels; :mod:`.attention_triton`: these
long sequences   :mod:`.attention_across`: attention whose sequence is cut; :mod:`.attention_call`: what of it a rank
                 has; :mod:`.attention_halves`: messages of the ring, and halves that ranks exchange;
                 :mod:`.attention_pairs`: which queries meet which keys; :mod:`.attention_kernels`: attention over some
                 keys; :mod:`.attention_sums`: what such parts add up to
random numbers   :mod:`.random`, :mod:`.draws`; :mod:`.fixed_order`: operators that add in no fixed order on GPUs
of autopar's own :mod:`.function` (a user's own backward), :mod:`.history` (writes), :mod:`.branch` (random branches)
not written      :mod:`.discovery`: rules that are found by trying an operator
on numbers       :mod:`.proof` of a rule; :mod:`.many_ranks`, :mod:`.one_by_one`, :mod:`.simulation`: ranks in a process
================ ======================================================================================================
"""

from __future__ import annotations

import importlib

FAMILIES = (
    "pointwise", "shape", "image", "reduce", "factory", "index", "contraction", "conv", "pool", "attention", "norm",
    "loss", "embed", "recurrences", "ctc", "experts", "expert_block", "random", "draws", "history", "branch",
    "discovery",
)  # fmt: skip

for _family in FAMILIES:
    importlib.import_module(f"autopar.rules.{_family}")
