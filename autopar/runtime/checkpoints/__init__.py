"""Saves of a run, which load on any mesh.

============================ ===========================================================================================
:mod:`.full_state_dict`      whole state dicts, with the names and shapes of one device
:mod:`.optimizer_state_dict` the state of an optimizer as one device has it
:mod:`.saving`               into one file, as a script of one device does
:mod:`.sharded_checkpoint`   a run on disk, whole at any moment: :mod:`.saves_in_folder` says which are, and one job,
                             the :mod:`.folder_owner`, saves there; :mod:`.training_state`: model and optimizer in it,
                             :mod:`.rank_state`: what is each rank's own; :mod:`.checkpoint_ranks`: who meets for it
:mod:`.save_in_progress`     writes one, of :mod:`.stored_shards` and :mod:`.generator_states`, in :mod:`.durable_files`
                             with checksums; :mod:`.state_before` undoes a load that fails
:mod:`.safetensors_folder`   weights as others publish them, in :mod:`.safetensors_files`
============================ ===========================================================================================
"""
