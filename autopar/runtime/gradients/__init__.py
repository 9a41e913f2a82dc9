"""Gradients on their way to the parameters.

========================== =============================================================================================
:mod:`.step_gradients`     a step's gradients: from the leaves that the program reads to the parameters that are stored
:mod:`.gradient_reduction` the collectives that reduce them, while the backward goes on
:mod:`.taking_part`        which parameters have one: not those of experts without rows
:mod:`.reached`            ... nor those that no gradient comes to, where random numbers choose
========================== =============================================================================================
"""
