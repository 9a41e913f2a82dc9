"""The planner, from a graph to a plan.

:mod:`.intra_op` decides how every operator is split on one mesh (an integer program); :mod:`.inter_op` decides where
the pipeline is cut and how it runs (a search over prices of blocks from the former, which knows nothing of it).
:mod:`.planning` goes from a request to a plan, by one or both; :mod:`.plan_notes` adds the notes of a plan,
:mod:`.host_bytes` what it takes of the host's memory.
:mod:`.layouts` plans layouts written in words, with nothing searched; :mod:`.microbatch_graphs` has the graphs of
microbatches for both; :mod:`.effort` has every constant that trades quality for time.
"""
