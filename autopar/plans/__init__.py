"""A plan as a value, and the options of a request for one.

The plan

======================== ==============================================================================================
:mod:`.plan`             every decision: stages, schedule, stage edges; :mod:`.pins`: which of them the user made;
                         :mod:`.plan_table`: its table in a notebook
:mod:`.device_groups`    where its stages run; :mod:`.stage_graphs`: a graph cut into their graphs
:mod:`.transfer`         transfers between stages: which rank sends which shard to which rank
:mod:`.moving`           parameters from one plan's layout to another's; :mod:`.moving_cost`: bytes, seconds and
                         memory of that
:mod:`.memory_decisions` decisions about memory between forward and backward; :mod:`.regather`: the tensors that are
                         regathered, recomputed or given up; :mod:`.offload_options`: the words of what may be moved
                         to the memory of the host
:mod:`.prices`           predicted cost of a stage: seconds and bytes; :mod:`.lacking_memory`: bytes that a device
                         has not; :mod:`.weight_versions`: what asynchronous schedules keep, and cannot train
:mod:`.stepped_by`       which of two optimizers steps on a parameter, where a plan is for Muon
======================== ==============================================================================================

The request

====================== ================================================================================================
:mod:`.plan_options`   options of a plan, one record each; :mod:`.request`: from a call's arguments to a search
:mod:`.clusters`       the hardware; :mod:`.detection`: which that is, by what the ranks report
====================== ================================================================================================
"""
