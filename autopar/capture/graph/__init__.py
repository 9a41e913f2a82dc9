"""From an exported program to a :class:`~autopar.words.graph.Graph` in one spelling.

============================= =========================================================================================
:mod:`.drafts`                the forms of a model on its way: traced program, draft
:mod:`.building`              the walk over the exported program
:mod:`.verifier`              checks of what a pass leaves
:mod:`.node_emitter`          one node of the graph
:mod:`.exported_nodes`        what stands in an exported program, and where
:mod:`.recorded_calls`        calls of user functions and hooks
:mod:`.selected_rows`         rows that a mask selects are all rows, and the mask; :mod:`.rows_of_graph`: what stands
                              for them; :mod:`.row_by_row`: what works on each by itself; :mod:`.rows_put_back`: where
                              they become part of a tensor of all; :mod:`.joined_rows`: those of several masks at once
:mod:`.conditional_writes`    what modules write that are called if there are such rows
:mod:`.same_masks`            masks that select the same rows, written down more than once
:mod:`.expert_turns`          loops over experts on such rows are one turn; :mod:`.run_once`: its body;
                              :mod:`.spread_gates`: masks that are columns of gates
:mod:`.expert_counts`         numbers of rows of each expert
:mod:`.experts_in_parallel`   experts that are modules beside each other, with tensors of one size: computed at once
:mod:`.common_subexpressions` equal expressions become one, on the pure graph
:mod:`.written_first`         parameters that a forward writes before it reads them are written before the program runs
:mod:`.marked_products`       products that a policy makes narrow, and the parameters that are their weights, are marked
:mod:`.writes_in_place`       parts of buffers are written where they lie, where nothing wants a gradient
:mod:`.expert_blocks`         routed experts become one operator each
:mod:`.dead_operators`        what nobody reads goes
============================= =========================================================================================
"""
