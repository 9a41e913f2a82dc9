"""Layouts in people's words, planned exactly: every operator, parameter and stage does what the words say.

============================ ==========================================================================================
:mod:`.layout_words`         the words, and what each of them pins
:mod:`.pricing`              layouts of one model, priced from one capture
:mod:`.dim_classes`          which dims go together: rows of the batch, places of a sequence, features
:mod:`.operator_cuts`        what each word cuts of each operator
:mod:`.separate_products`    products that make q, k and v at once, taken apart
:mod:`.loss_by_places`       losses over (batch sequence), written over both
:mod:`.stage_starts`         the even division of a model's blocks over stages
:mod:`.pinned_plan`          the plan of a layout, its step simulated and its memory counted, whether it fits or not
============================ ==========================================================================================
"""
