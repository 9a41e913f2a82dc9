"""Repeated blocks are traced twice and then written out with their own names.

======================= ===============================================================================================
:mod:`.repeated`        which calls look the same, and what becomes of the third one
:mod:`.block_calls`     what a call of a block takes and gives
:mod:`.attribute_reads` which differing attributes the block's code reads
:mod:`.names_asked`     the names of a graph as they are asked for
:mod:`.python_state`    the Python state that the block's code can see
:mod:`.written_out`     the operators of skipped calls, as if they had been traced
======================= ===============================================================================================
"""
