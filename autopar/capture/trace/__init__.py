"""The trace: ``torch.export`` runs the model's code on tensors without values.

===================== ==============================================================================================
:mod:`.tracing`       one run of ``torch.export``
:mod:`.answers`       those that branches on tensors get where no data is in them, and masks that are known
:mod:`.made_from`     what a tensor comes from: numbers alone, random operators, or data
:mod:`.distinct`      ``torch.unique``, where it is known how many there are
:mod:`.one_place`     ``x[i]`` with a number that is not known, as a lookup
:mod:`.quick`         what ``torch.export`` may leave out here
:mod:`.autocast`      regions of ``torch.autocast`` become the casts that it makes
:mod:`.progress`      how far it is, and Ctrl-C
:mod:`.recording`     operators of autopar's own that stand for what export would take apart or forget
:mod:`.functions`     ... a user's own backward; :mod:`.hooks` on tensors; :mod:`.regions` of activation checkpointing
:mod:`.own_checkpoints` ... that a model has written itself
:mod:`.inner_gradients` ``torch.autograd.grad`` inside a forward
:mod:`.experts_by_rows` routed experts in one form; :mod:`.expert_loops`: where a loop runs them
:mod:`.grouped_rows`  ... with rows in the order of their experts; counts of a known number
:mod:`.running_counts` ... that stand between running counts; :mod:`.hit_experts`: loops over experts that have some
:mod:`.dispatched`    ... that ``nonzero(gates).sort(0)`` finds
:mod:`.one_hot_sizes` as many classes as the largest number needs, of which the first are kept
:mod:`.passed_over`   experts without rows have no gradient
:mod:`.lengths`       ``len(rows)`` of rows whose number depends on data
:mod:`.recurrent`     stacks of LSTM, GRU and RNN, layer by layer; :mod:`.transcripts`: CTC
:mod:`.packed`        packed sequences, as the padded batch that they came from
:mod:`.bags`          bags of embeddings that are as long as each other: lookups, and their sum
:mod:`.cumulative_norms` batch norms with ``momentum=None``
:mod:`.unread_strings` strings of a call in whose place stands what tells whether it is asked
:mod:`.flex`          ``flex_attention``: causal, or with the mask and the scores that its functions make
:mod:`.varlen`        ``varlen_attn``: documents packed into one row
:mod:`.mapped`        ``torch.vmap`` and ``torch.func.grad`` become the operators that they make
:mod:`.seeding`       random numbers from generators of the model's own are refused; :mod:`.memos` are forgotten
:mod:`.outside_torch` numbers from Python's and numpy's generators are drawn by torch
===================== ==============================================================================================
"""
