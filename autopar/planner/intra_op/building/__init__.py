"""The integer program: from a graph to numbers only, and from a solution back.

=============== =======================================================================================================
:mod:`.fold`    identical blocks are found and decided once
:mod:`.space`   what each operator can do on each axis; :mod:`.parameter_sharding`: how a parameter can be stored and
                used
:mod:`.price`   seconds and bytes of an operator and of a step of a reshard; :mod:`.hidden_seconds`: seconds of
                collectives that pass while others compute, :mod:`.parameter_load`: the same of parameters, and what a
                stage does besides ops; :mod:`.overlap_terms`: in the problem; :mod:`.narrow_prices`: products in 8
                and 4 bits, with their casts; :mod:`.matrix_prices`: an optimizer's steps on whole matrices
:mod:`.chains`  operators that follow each other's cuts, decided as one; :mod:`.flows`: tensors on the way to their
                readers
:mod:`.build`   graph -> :mod:`.integer_program`, where the mathematics stands; :mod:`.parameter_items`: its parameters
:mod:`.decoder` a solution, read back
=============== =======================================================================================================
"""
