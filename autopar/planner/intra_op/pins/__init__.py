"""What a user asks of one mesh.

======================== ==============================================================================================
:mod:`.options`          what may be asked, checked
:mod:`.pinned_choices`   what pins leave of the choices
:mod:`.small_parameters` what stays whole although a pattern asks for pieces
:mod:`.clashing_pins`    which pins leave no plan, where there is none
======================== ==============================================================================================
"""
