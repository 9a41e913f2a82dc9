"""The options of a user for one mesh.

======================== ==============================================================================================
:mod:`.options`          the options, checked
:mod:`.pinned_choices`   the choices that pins leave
:mod:`.host_storage`     parameters that may or must be stored in the memory of the host
:mod:`.small_parameters` parameters that stay replicated although a pattern shards them
:mod:`.clashing_pins`    the pins that together leave no plan
======================== ==============================================================================================
"""
