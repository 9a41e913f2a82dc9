"""Input of the simulator from planned stages, and the orders that are searched with it.

============== ========================================================================================================
:mod:`.timing` seconds of phases and of transfers between stages, and bytes
:mod:`.phases` when within a step a plan's seconds are spent
:mod:`.order`  schedules that are searched for, within the stages' memory
============== ========================================================================================================
"""
