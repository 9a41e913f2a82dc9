"""Running plans: programs with parameters, on ranks. Each folder is one idea, and lists its modules.

Folders import those above them in this list, never one below (``tests/unit/test_floors.py`` checks it).

=================== ===================================================================================================
:mod:`.ranks`       processes, their groups, agreement and failures

:mod:`.parameters`  stored as DTensors and used by programs: the collectives between the two, and when
:mod:`.repairs`     what torch gets wrong where parameters are DTensors, for the whole process
:mod:`.gradients`   on their way from what programs read to the parameters: added up, reduced, given to the optimizer
:mod:`.optimizers`  torch's optimizers of before ``parallelize``, and gradient scalers

:mod:`.batches`     a call's tensors: checked, cut into microbatches and pieces, and what comes back
:mod:`.stages`      a program on one mesh with the parameters and buffers that it reads; compiled
:mod:`.variants`    what a module runs: the programs of one model, by the shapes and the Python values of a call

:mod:`.one_mesh`    a model that is one stage: ``MeshRun``, and a training step of it; as a CUDA graph
:mod:`.pipelines`   a model in several stages: ``PipelineRun``, the work of a schedule, messages between stages

:mod:`.checkpoints` whole state dicts, files and folders
:mod:`.as_module`   what a parallel module is as ``torch.nn.Module``: attributes, methods, modes, state dicts
=================== ===================================================================================================
"""
