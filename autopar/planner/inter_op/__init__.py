"""Cuts of a pipeline, the devices of each stage, and the order of their actions.

A search, driven by :mod:`.stage_search`, goes through four steps: bound, estimate, simulate, plan exactly. Its folders
are in that order, and import only from those above them.

============================ ==========================================================================================
:mod:`.blocks`               where a model may be cut
:mod:`.simulating`           what a simulator needs to know of planned stages: when a plan's seconds are spent, what
                             crosses; and schedules that are searched for
:mod:`.estimating`           stages put together from what blocks can cost, before any stage is planned, and simulated
:mod:`.candidates`           options of a search, and the cuts that estimates propose for exact plans
:mod:`.exact`                the best few planned stage by stage and simulated
:mod:`.per_microbatch_count` cuts for one number of microbatches: all of the above
:mod:`.single_stage`         one group of all devices: a true bound of every layout, and straight to the exact plan
:mod:`.incumbents`           the exact plans so far, and what may beat them; :mod:`.nothing_fits`: the error without
                             one
:mod:`.stage_pins`           what a user asks of the whole model, for each stage
:mod:`.replan`               a finished plan with one stage or cut changed
============================ ==========================================================================================
"""
