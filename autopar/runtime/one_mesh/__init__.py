"""A model on one mesh.

======================= ================================================================================================
:mod:`.executor`        its program with its parameters, and a call
:mod:`.mesh_step`       ``MeshRun``: a training step of it, in microbatches; :mod:`.cuda_graphs`: as a CUDA graph
:mod:`.crossing`        its program as a node of the caller's autograd graph; :mod:`.direct`: on one device
:mod:`.left_attributes` what calls leave in attributes; :mod:`.statistics_anew`: ``update_bn``
======================= ================================================================================================
"""
