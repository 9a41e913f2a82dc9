"""The trace: ``torch.export`` runs the model's code on tensors without values.

============================ ==========================================================================================
:mod:`.tracing`              one run of ``torch.export``
:mod:`.python_questions`     those that branches on tensors get where no data is in them, and masks that are known
:mod:`.value_origins`        what a tensor comes from: numbers alone, random operators, or data
:mod:`.unique_values`        ``torch.unique``, where it is known how many there are
:mod:`.row_by_number`        ``x[i]`` with a number that is not known, as a lookup
:mod:`.faster_tracing`       what ``torch.export`` may leave out here
:mod:`.autocast`             regions of ``torch.autocast`` become the casts that it makes
:mod:`.trace_progress`       how far it is, and Ctrl-C
:mod:`.recording`            operators of autopar's own that stand for what export would take apart or forget
:mod:`.autograd_functions`   ... a user's own backward; :mod:`.tensor_hooks` on tensors; :mod:`.checkpointed_regions`
                             of activation checkpointing
:mod:`.own_checkpoints`      ... that a model has written itself
:mod:`.inner_gradients`      ``torch.autograd.grad`` inside a forward
:mod:`.experts_by_rows`      routed experts in one form; :mod:`.expert_loops`: where a loop runs them
:mod:`.grouped_rows`         ... with rows in the order of their experts; counts of a known number
:mod:`.running_counts`       ... that stand between running counts; :mod:`.hit_experts`: loops over experts that have
                             some
:mod:`.expert_dispatch`      ... that ``nonzero(gates).sort(0)`` finds
:mod:`.one_hot_sizes`        as many classes as the largest number needs, of which the first are kept
:mod:`.unused_parameters`    experts without rows have no gradient
:mod:`.lengths_of_rows`      ``len(rows)`` of rows whose number depends on data
:mod:`.recurrent_layers`     stacks of LSTM, GRU and RNN, layer by layer; :mod:`.ctc_targets`: CTC
:mod:`.packed_sequences`     packed sequences, as the padded batch that they came from
:mod:`.adaptive_softmax`     torch's adaptive softmax with all rows in all clusters
:mod:`.embedding_bags`       bags of embeddings: lookups, and their sum
:mod:`.cumulative_norms`     batch norms with ``momentum=None``
:mod:`.unread_strings`       strings of a call in whose place stands what tells whether it is asked
:mod:`.flex_attention`       ``flex_attention``: causal, or with the mask and the scores that its functions make
:mod:`.varlen_attention`     ``varlen_attn``: documents packed into one row
:mod:`.functorch_transforms` ``torch.vmap`` and ``torch.func.grad`` become the operators that they make
:mod:`.seeding`              random numbers from generators of the model's own are refused; :mod:`.memoized_functions`
                             are forgotten
:mod:`.python_random`        numbers from Python's and numpy's generators are drawn by torch
============================ ==========================================================================================
"""
