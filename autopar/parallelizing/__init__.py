"""What one call of ``parallelize`` (:mod:`autopar.api`) does, in its order.

===================== =================================================================================================
:mod:`.arguments`     the call's arguments, checked: of the right types, and alike on ranks
:mod:`.call_examples` example inputs, as scripts give them
:mod:`.forward_only`  a model that runs forward alone, ``mode="inference"``
:mod:`.precisions`    a choice among precision policies
:mod:`.given_plans`   a plan that is given; else one is searched for (:mod:`autopar.planner.planning`),
                      :mod:`.bucket_plans`: for several shapes together
:mod:`.all_ranks`     the plan on all ranks, and the module that runs it
:mod:`.replanning`    another program for other shapes or values, later on
===================== =================================================================================================
"""
