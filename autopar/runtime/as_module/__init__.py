"""The module that a script holds: the user's own object, of a class derived from its own.

======================= ===============================================================================================
:mod:`.parallel_module` the derived class of the whole, for one mesh and pipelines: ``ParallelModule``
:mod:`.submodules`      the derived classes of its submodules; :mod:`.methods`: methods of both, on whole values
:mod:`.user_module`     the module as its user wrote it, and how it becomes that again to be captured
:mod:`.old_parameters`  the parameters that it had before
:mod:`.run`             what it runs, on one mesh and in stages alike; :mod:`.module_modes`: which modules train
:mod:`.left_attributes` what calls leave in attributes; :mod:`.statistics_anew`: ``update_bn``
:mod:`.copied`          ``copy.deepcopy``
:mod:`.model_class`     modules that are taken for a model of another class
======================= ===============================================================================================
"""
