"""What is saved of a run, and loaded: on any mesh.

========================== ============================================================================================
:mod:`.full_state_dict`    whole state dicts, with the names and shapes of one device
:mod:`.saving`             into one file, as a script of one device does
:mod:`.sharded_checkpoint` a run on disk, whole at any moment, with :mod:`.generator_states`, in :mod:`.durable_files`
:mod:`.safetensors_folder` weights as others publish them, in :mod:`.safetensors_files`
========================== ============================================================================================
"""
