"""Distributed lowerings: functions of local tensors and collectives, for factors whose cut needs communication inside.

They stand beside the rule that names them; here is what they share.

========================== ============================================================================================
:mod:`.collective_helpers` sums, maxima, means and messages across the axes that cut a factor
:mod:`.joined_axes`        process groups over several axes
:mod:`.local_shard`        which piece of a dim this rank has: number, length, first element, share
:mod:`.lowering_trial`     where lowerings run without ranks, or are counted
:mod:`.overlapped_steps`          what runs while collectives of others are under way
:mod:`.narrow_numbers`     numbers of eight bits with scales, and products of them; :mod:`.narrow_cast_triton`: the cast
                           on GPUs
========================== ============================================================================================
"""
