"""Optimizers of torch, on parameters that are DTensors.

======================= ================================================================================================
:mod:`.user_optimizers` those that were made before the model was spread
:mod:`.grad_scaler`     steps with a ``GradScaler``
:mod:`.closures`        those whose step computes the loss itself
:mod:`.several`         the one or several that ``train_step`` is given
======================= ================================================================================================
"""
