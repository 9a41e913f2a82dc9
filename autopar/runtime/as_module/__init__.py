"""What a parallel module is to a script: a ``torch.nn.Module`` that stands for the model.

======================== ==============================================================================================
:mod:`.spread`           what the modules on one mesh and in stages share; :mod:`.spread_state`: their state dicts
:mod:`.submodules`       what stands for the model's submodules; :mod:`.methods`: the model's methods, on whole values
:mod:`.left_attributes`  what the model would leave in attributes; :mod:`.own_names`: names that both have
:mod:`.spread_modes`     ``train()`` and ``eval()``; :mod:`.modes`: which modules train, and in which programs;
                         :mod:`.kept_modes`: those that ``train()`` leaves
:mod:`.statistics_anew`  ``update_bn``; :mod:`.copied`: ``copy.deepcopy``
:mod:`.original`         the model after ``parallelize``; :mod:`.old_parameters`: its own parameters
======================== ==============================================================================================
"""
