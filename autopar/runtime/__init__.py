"""Running plans: programs with parameters, on ranks. Each folder is one idea, and lists its modules.

What computes

================= =====================================================================================================
:mod:`.stages`    a program on one mesh with the parameters and buffers that it reads; compiled, as a CUDA graph
:mod:`.one_mesh`  a model that is one stage: ``MeshRun``, and a training step of it
:mod:`.pipelines` a model in several stages: ``PipelineRun``, the work of a schedule, messages between stages
:mod:`.variants`  the programs of one model: by the shapes and the Python values of a call
================= =====================================================================================================

What it computes with

================== ====================================================================================================
:mod:`.parameters` stored as DTensors and used by programs: the collectives between the two, and when
:mod:`.gradients`  on their way from what programs read to the parameters: added up, reduced, given to the optimizer
:mod:`.batches`    a call's tensors: checked, cut into microbatches and pieces, and what comes back
================== ====================================================================================================

What a script sees of it

=================== ===================================================================================================
:mod:`.as_module`   what a parallel module is as ``torch.nn.Module``: attributes, methods, modes, state dicts
:mod:`.optimizers`  steps of torch's optimizers on DTensors, and their state
:mod:`.checkpoints` whole state dicts, files and folders
=================== ===================================================================================================

Below all of it, :mod:`.ranks`: processes, their groups, agreement and failures; many ranks in one process.
"""
