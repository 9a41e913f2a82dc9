"""Cuts with their estimates, before any stage is planned.

========================== ============================================================================================
:mod:`.block_costs`        what a block can cost on a mesh: several plans from the fastest to the smallest
:mod:`.filling`            stages put together from these, as many blocks each as a pace and the memory allow
:mod:`.equal`              stages on equal groups of devices; :mod:`.unequal`: on unequal ones
:mod:`.estimates`          what both of them hand on
:mod:`.simulated_estimate` estimates tried in the simulator
========================== ============================================================================================
"""
