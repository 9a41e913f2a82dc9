"""Python values that a model's code reads and writes while it is traced.

========================= =============================================================================================
:mod:`.python_reads`      attributes that are read and written, as they are; :mod:`.buffer_writes`: and buffers
:mod:`.containers`        what attributes, lists and dicts held before a forward, and hold after it
:mod:`.globals_read`      globals and free variables, found in the code; :mod:`.bytecode`: the one file that reads it
:mod:`.generators`        random numbers from outside torch
:mod:`.restoring`         everything put back that a run of the model changes, and the same random numbers again
:mod:`.guards`            what was read, compared at each call; :mod:`.frozen_values`: in which form
:mod:`.attribute_outputs` what a forward leaves in attributes for its caller, which becomes outputs
:mod:`.attribute_lookups` the classes whose attribute lookups are recorded while a trace runs
:mod:`.user_lines`        whose code, and which line
========================= =============================================================================================
"""
