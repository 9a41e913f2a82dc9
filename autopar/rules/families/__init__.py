"""Rules of operators, family by family, each with its lowerings; attention and experts have folders of their own.

Elementwise and shapes: :mod:`.pointwise`, :mod:`.shape`, :mod:`.image`, :mod:`.factory`, :mod:`.index`,
:mod:`.embedding`. Sums and products: :mod:`.reduce`, :mod:`.contraction`, :mod:`.narrow_linear` (in eight bits),
:mod:`.conv`, :mod:`.pool`, :mod:`.recurrences`; counts: :mod:`.histogram`. Norms and losses: :mod:`.norm`,
:mod:`.batch_norm_across` (over several ranks), :mod:`.single_rows` (of one row each), :mod:`.loss`, :mod:`.ctc`. Random
numbers: :mod:`.sharded_random` (:mod:`.dropout_triton`: its kernels; :mod:`.hash_multipliers`),
:mod:`.random_distributions`, :mod:`.multinomial`, :mod:`.torch_draws` (by torch's generator), :mod:`.seeded_number` (of
Python's own generators); :mod:`.fixed_order`: operators that add in no fixed order on GPUs. Of autopar's own:
:mod:`.value_without_history` (writes), :mod:`.branch` (random branches).
"""
