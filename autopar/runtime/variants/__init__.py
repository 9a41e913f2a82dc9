"""The programs of one model: each is captured for some shapes, and for what the model's Python values were.

===================== =================================================================================================
:mod:`.program_cache` programs by these, and whether the model's Python values are those that were captured;
                      :mod:`.module_calls`: what of a call says which one is needed
:mod:`.recaptured`    how a module takes another one
:mod:`.buckets`       calls that are padded to one of a few shapes
===================== =================================================================================================
"""
