"""Parameters: stored as DTensors for the optimizer, used as plain local tensors by programs.

===================== ==================================================================================================
:mod:`.state`         a parameter as it is stored and as it is used; :mod:`.redistribution`: the collectives between the
                      two; :mod:`.placed_alike`: other tensors placed as it is
:mod:`.gathering`     parameters that are gathered together; :mod:`.prefetch`: when; :mod:`.narrow_gathers`: in eight
                      bits
:mod:`.host_memory`   parameters in the memory of the host: copies of values in, of gradients out
:mod:`.init`          values of models that have none yet
:mod:`.user_module`   the module as its user wrote it, and how it becomes that again to be captured;
                      :mod:`.old_parameters`: the parameters that it had before
:mod:`.attributes`    what a model's code writes on its parameters beside their values
:mod:`.relayout`      parameters that are stored in other pieces from now on
:mod:`.to_owners`     tensors in pieces, each brought whole to one rank and back; :mod:`.whole_matrices`: for Muon's
                      steps; :mod:`.whole_steps`: for those of other optimizers that need whole parameters
:mod:`.rounded_steps` steps under a policy with moments in fewer bits, or stochastic rounding
===================== ==================================================================================================
"""
