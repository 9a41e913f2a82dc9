"""Repairs of torch, for the whole process, where parameters are DTensors.

=================================== ====================================================================================
:mod:`.replacements`                what a repair is, and for which versions of torch
:mod:`.dtensor_fixes`               what DTensor gets wrong in silence; :mod:`.dtensor_writes`: about writes to parts
:mod:`.mixed`                       plain tensors beside DTensors
:mod:`.functions_of_all_parameters` functions of torch that take the parameters of one rank for all of the model's
:mod:`.optimizer_steps`             steps of optimizers, on pieces or on whole parameters; :mod:`.step_trial`: which
                                    optimizers need whole ones
=================================== ====================================================================================
"""
