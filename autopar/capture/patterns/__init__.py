"""Patterns of users: a file for each that serves few families of models, unknown to the rest of capture.

Every file here registers its patches, handlers or passes when it is imported, and :func:`load` imports them all. To add
one, add a file; to do without one, delete it, and only its own tests fail.

========================= ==============================================================================================
:mod:`.adaptive_softmax`  torch's adaptive softmax with all rows in all clusters
:mod:`.ctc_targets`       CTC, whose targets stay in rows
:mod:`.cumulative_norms`  batch norms with ``momentum=None``
:mod:`.embedding_bags`    bags of embeddings: lookups, and their sum
:mod:`.entered_branches`  branches that are entered where a mask selects rows: which parameters take part in a call
:mod:`.expert_dispatch`   experts whose rows ``nonzero(gates).sort(0)`` finds
:mod:`.expert_loops`      classes of ``transformers`` that run one expert after the other
:mod:`.flex_attention`    ``flex_attention``: causal, or with the mask and the scores that its functions make
:mod:`.gathered_matrices` a matrix that is gathered for each row: a product by rows
:mod:`.grouped_rows`      rows in the order of their experts, and parts of them by counts
:mod:`.hit_experts`       loops over the experts that have rows
:mod:`.lengths_of_rows`   ``len(rows)`` of rows whose number depends on data
:mod:`.one_hot_sizes`     as many classes as the largest number needs, of which the first are kept
:mod:`.own_checkpoints`   activation checkpointing that a model has written itself
:mod:`.packed_sequences`  packed sequences, as the padded batch that they came from
:mod:`.regions_inlined`   regions without gradients in which selected rows are worked on
:mod:`.sorted_rows`       rows in the order of their experts stay in their own
:mod:`.varlen_attention`  ``varlen_attn``: documents packed into one row
========================= ==============================================================================================
"""

from __future__ import annotations

import importlib
import pkgutil

_begun = False


def load() -> None:
    """Import every pattern, in the order of their names; what a pattern itself calls while it is imported does not."""
    global _begun
    if _begun:
        return
    _begun = True
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{name}")


__all__ = ["load"]
