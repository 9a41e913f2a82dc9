"""The trace: ``torch.export`` runs the model's code on tensors without values.

============================ ==========================================================================================
:mod:`.tracing`              one run of ``torch.export``, and one message for what it raises
:mod:`.decisions`            what is settled before a trace, and the loop that traces again with one more decision
:mod:`.contexts`             the ordered table of what is exchanged in a trace; :mod:`.patches`: its records, and the
                             dispatcher of torch's functions
:mod:`.recording`            the record of the trace under way; operators for what torch's cannot express
:mod:`.python_questions`     questions for the values of tensors, and their answers
:mod:`.value_origins`        the origin of a tensor: numbers alone, random operators, or data
:mod:`.unique_values`        ``torch.unique``, if it is known how many there are
:mod:`.row_by_number`        ``x[i]`` with a number that is not known, as a lookup
:mod:`.faster_tracing`       work of ``torch.export`` that may be left out here
:mod:`.autocast`             regions of ``torch.autocast`` become the casts that it makes
:mod:`.trace_progress`       the module that is being traced, for whoever waits
:mod:`.autograd_functions`   a user's own backward; :mod:`.tensor_hooks` on tensors; :mod:`.checkpointed_regions` of
                             activation checkpointing
:mod:`.inner_gradients`      ``torch.autograd.grad`` inside a forward
:mod:`.experts_by_rows`      routed experts of ``transformers`` in one form; :mod:`.unused_parameters`: those without
                             rows have no gradient
:mod:`.recurrent_layers`     stacks of LSTM, GRU and RNN, layer by layer
:mod:`.unread_strings`       strings of a call that are hidden, to see whether the model reads them
:mod:`.functorch_transforms` ``torch.vmap`` and ``torch.func.grad`` become the operators that they make
:mod:`.seeding`              random numbers from generators of the model's own are refused; :mod:`.memoized_functions`
                             are forgotten
:mod:`.python_random`        numbers from Python's and numpy's generators are drawn by torch
============================ ==========================================================================================
"""
