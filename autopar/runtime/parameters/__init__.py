"""Parameters: stored as DTensors for the optimizer, used as plain local tensors by programs.

=================== ===================================================================================================
:mod:`.state`       a parameter as it is stored and as it is used; :mod:`.redistribution`: the collectives between the
                    two
:mod:`.gathering`   parameters that are gathered together; :mod:`.prefetch`: when
:mod:`.init`        values of models that have none yet
:mod:`.registering` a model's parameters and buffers, placed and registered under their names
:mod:`.attributes`  what a model's code writes on its parameters beside their values
:mod:`.relayout`    parameters that are stored in other pieces from now on
=================== ===================================================================================================

In a script they are DTensors

=================================== ===================================================================================
:mod:`.dtensor_fixes`               what torch gets wrong in silence; :mod:`.dtensor_writes`: about writes to parts;
                                    :mod:`.repairs`: what a repair is, and for which versions
:mod:`.mixed`                       plain tensors beside them
:mod:`.functions_of_all_parameters` functions of torch that take the parameters of one rank for all of the model's
=================================== ===================================================================================
"""
