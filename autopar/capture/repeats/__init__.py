"""Repeated blocks are traced twice and then written out with their own names.

======================= ===============================================================================================
:mod:`.repeated`        comparison of calls, and skipping of the third equal one
:mod:`.block_calls`     arguments and results of a block's call
:mod:`.attribute_reads` differing attributes that the block's code reads
:mod:`.names_asked`     the requested names of a graph
:mod:`.python_state`    the Python state that the block's code can see
:mod:`.written_out`     the operators of skipped calls, as if they had been traced
======================= ===============================================================================================
"""
