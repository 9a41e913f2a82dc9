"""A model on one mesh.

==================== ==================================================================================================
:mod:`.executor`     ``MeshRun``: its program with its parameters, and a call
:mod:`.mesh_step`    a training step of it, in microbatches
:mod:`.crossing`     its program as a node of the caller's autograd graph; :mod:`.direct`: on one device
:mod:`.mesh_outputs` what a call gives back
==================== ==================================================================================================
"""
