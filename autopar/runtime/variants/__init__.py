"""The programs of one model: each is captured for some shapes, and for what the model's Python values were.

===================== =================================================================================================
:mod:`.program_cache` programs by these; :mod:`.module_calls`: what of a call says which one is needed
:mod:`.values`        whether the model's Python values are those that were captured
:mod:`.recaptured`    how a module takes another one
:mod:`.buckets`       calls that are padded to one of a few shapes
===================== =================================================================================================
"""
