"""Aliasing while a graph is built: which tensors share storage, and what a write changes.

================ ======================================================================================================
:mod:`.storages` places in storages, their versions and histories
:mod:`.views`    reading through views
:mod:`.writes`   writing through them
:mod:`.inverses` how a view is undone
:mod:`.schemas`  what an operator's schema says: what it writes, its functional form, whether it draws
:mod:`.sharing`  what else shares memory, asked of the operator itself
================ ======================================================================================================
"""
