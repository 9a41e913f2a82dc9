"""Optimizers of torch, on parameters that are DTensors.

======================== ==============================================================================================
:mod:`.made_before`      those that were made before the model was spread
:mod:`.optimizer_steps`  steps on pieces or on whole parameters; :mod:`.scaled_steps`: with a ``GradScaler``
:mod:`.rounded_steps`    under a policy with moments in fewer bits, or stochastic rounding
:mod:`.optimizer_state`  the state as one device has it
======================== ==============================================================================================
"""
