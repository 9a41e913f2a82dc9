"""What a module runs: the programs of one model.

Each is captured for some shapes, and for what the model's Python values were.

===================== ==================================================================================================
:mod:`.run`           what a parallel module runs, on one mesh and in stages; :mod:`.module_modes`: which modules train
:mod:`.program_run`   which program runs, and how another takes its place; :mod:`.recaptured`: what that one reads
:mod:`.program_cache` programs by shapes and values, and whether the values are those that were captured
:mod:`.buckets`       calls that are padded to one of a few shapes
===================== ==================================================================================================
"""
