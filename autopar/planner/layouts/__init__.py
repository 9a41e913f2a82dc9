"""Layouts in people's words, planned exactly: every operator, parameter and stage does what the words say.

============================ ==========================================================================================
:mod:`.dim_classes`          which dims of a model's tensors go together: rows of the batch, places of a sequence, features
:mod:`.operator_cuts`        what each word cuts of each operator
:mod:`.stage_starts`         the even division of a model's blocks over stages
:mod:`.pinned_plan`          the plan of a layout, its step simulated and its memory counted, whether it fits or not
============================ ==========================================================================================
"""
