"""Distributed lowerings: functions of local tensors and collectives, for factors whose cut needs communication inside.

They stand beside the rule that names them; here is what they share.

======================= ===============================================================================================
:mod:`.distributed`     collectives and sizes
:mod:`.lowering_trial`  where lowerings run without ranks, or are counted
:mod:`.meanwhile`       what runs while collectives of others are under way
======================= ===============================================================================================
"""
