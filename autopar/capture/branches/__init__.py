"""Branches of Python code on tensors: of random ones both sides are kept, of data the example's side is followed.

``if torch.rand(()) < p: continue`` (LayerDrop, stochastic depth) takes another way at every step. A trace goes one way.
So the model is traced several times, with other answers, and the graphs become one, in which the random number chooses.

========================== ============================================================================================
:mod:`.random_answers`     while a model is traced: who asks, and what is answered; :mod:`.unknown_numbers`: random
                           numbers there
:mod:`.random_branches`    which answers are tried, and whether the graph that comes of it is right for all that were
:mod:`.joining_drafts`     two graphs that differ in some answers: what they have in common, and where their values
                           meet again
:mod:`.uniting_traces`     one graph of all
:mod:`.branch_equivalence` whether a graph computes what another does, once its branches are settled
:mod:`.data_branches`      branches on data: the way that the example takes, checked at every call
:mod:`.observed_run`       ... as a run of the model on it says; :mod:`.numbers_given`: to functions of torch that take
                           sizes
:mod:`.masks`              of these: whether a mask selects any rows, which is no branch that matters
:mod:`.only_rows`          which of those do nothing but work on these rows; :mod:`.syntax`: read from the code
========================== ============================================================================================
"""
