"""Models that generate on several ranks, from ``parallelize(mode="inference")`` down.

====================== ================================================================================================
:mod:`.prepared`       what is spread in place of the model, and what the user gets; the example of one token
:mod:`.generating`     a model of ``transformers`` whose own ``generate`` runs programs; what it refuses
:mod:`.cached_models`  such a model as a module of tensors, with its caches as buffers; its encoder apart
:mod:`.plain_models`   plain torch models with caches, and a loop that generates
:mod:`.cache_calls`    calls filled up to the shapes of programs; steps of an engine
====================== ================================================================================================

Plans for serving are :mod:`autopar.serving`.
"""
