"""Where the pipeline is cut, on which devices each stage runs, and in which order.

In the order in which a search passes through, driven by :mod:`.stage_search`: bound, estimate, simulate, plan exactly.

==================== ==================================================================================================
:mod:`.blocks`       where a model may be cut
:mod:`.menu`         what a block can cost on a mesh: several plans from the fastest to the smallest
:mod:`.one_number`   ways to cut for one number of microbatches: all of the below
:mod:`.filling`      stages put together from these, as many blocks each as a pace and the memory allow
:mod:`.equal`        stages on equal groups of devices, estimated; :mod:`.unequal`: on unequal ones; :mod:`.estimates`:
                     what both of them hand on
:mod:`.one_group`    one group of all devices: a true bound of every layout, and straight to the exact plan
:mod:`.trial`        estimates tried in the simulator
:mod:`.candidates`   what is asked of a search, and the ways to cut that it proposes for exact plans
:mod:`.exact_stages` the best few planned stage by stage and simulated; :mod:`.stage_plans`: stages that are alike are
                     planned once (:mod:`.transplant`); :mod:`.memory_shares`: stages of one group
:mod:`.incumbents`   the exact plans so far, and what may beat them; :mod:`.nothing_fits`: the error without one
:mod:`.order`        schedules that are searched for
:mod:`.timing`       what a simulator needs to know of planned stages: :mod:`.phases`, :mod:`.beside`
:mod:`.stage_pins`   what a user asks of the whole model, for each stage; :mod:`.layouts`: in the words that people use
:mod:`.shared_buffers` what stages on the same devices store once
:mod:`.replan`       a finished plan with one stage or cut changed
==================== ==================================================================================================
"""
