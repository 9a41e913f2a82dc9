"""Optimizers of torch, on parameters that are DTensors.

============================ ==========================================================================================
:mod:`.user_optimizers`      those that were made before the model was spread
:mod:`.optimizer_steps`      steps on pieces or on whole parameters; :mod:`.grad_scaler`: with a ``GradScaler``
:mod:`.rounded_steps`        under a policy with moments in fewer bits, or stochastic rounding
:mod:`.optimizer_state_dict` the state as one device has it
============================ ==========================================================================================
"""
