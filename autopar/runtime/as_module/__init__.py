"""The module that a script holds: the user's own object, of a class derived from its own.

======================== ===============================================================================================
:mod:`.parallel_module`  the derived class of the whole, for one mesh and pipelines: ``ParallelModule``
:mod:`.submodules`       the derived classes of its submodules; :mod:`.methods`: methods of both, on whole values
:mod:`.spreading`        a model turned into one, as a plan says; :mod:`.copied`: ``copy.deepcopy``
:mod:`.callers_compiler` calls within a ``torch.compile`` of the user's
:mod:`.model_class`      modules that are taken for a model of another class
======================== ===============================================================================================
"""
