"""Inference: plans for serving a model, and the model that generates on several ranks.

================== ====================================================================================================
:mod:`.records`    a plan for serving: load, workers with their layouts, predicted times, memory
:mod:`.plan_file`  a plan for serving as the text of a file, and back
================== ====================================================================================================
"""
