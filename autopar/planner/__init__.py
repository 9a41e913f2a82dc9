"""From a graph to a plan. The planner makes two things, one in each folder.

:mod:`.intra_op` decides how every operator is cut on one mesh (an integer program); :mod:`.inter_op` decides where the
pipeline is cut and how it is run (a dynamic program over what the first says of blocks). The first knows nothing of the
second. :mod:`.planning` goes from what is asked to a plan, by one or by both; :mod:`.plan_notes` says what its reader
should know. :mod:`.layouts` plans what people say in words, with nothing searched; :mod:`.microbatch_graphs` has the
graphs of microbatches for both.
"""
