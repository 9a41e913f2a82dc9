"""What a parallel module is to a script: a ``torch.nn.Module`` that stands for the model.

======================= ===============================================================================================
:mod:`.parallel_module` what the modules on one mesh and in stages share; :mod:`.parallel_state_dict`: their state
                        dicts
:mod:`.submodules`      what stands for the model's submodules; :mod:`.methods`: the model's methods, on whole values
:mod:`.left_attributes` what the model would leave in attributes; :mod:`.own_names`: names of its own
:mod:`.train_and_eval`  ``train()`` and ``eval()``; :mod:`.module_modes`: which modules train, and in which programs;
                        :mod:`.kept_modes`: those that ``train()`` leaves
:mod:`.statistics_anew` ``update_bn``; :mod:`.copied`: ``copy.deepcopy``
:mod:`.original_model`  the model after ``parallelize``; :mod:`.old_parameters`: its own parameters;
                        :mod:`.replaced_parameters`: who reads them
:mod:`.model_class`     its class, name and signature, of which libraries ask
======================= ===============================================================================================
"""
