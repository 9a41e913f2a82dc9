"""Parameters that take no part in a call: an expert without rows has no gradient at all in eager mode.

``for e in experts_hit: ...`` and ``if mask.any(): out[mask] = expert(x[mask])`` never run an expert that got no rows,
so its parameters keep ``grad`` as it was, None for one that is fresh, and optimizers with momentum or weight decay
leave them alone. In a program all experts are one product, whose gradient for such an expert is zeros, which is
something else. So the trace says by an operator ``autopar::took_part`` which numbers of the routing decide whether
a parameter took part. In the graph they are a buffer (:data:`~autopar.words.graph.PART`) that each call writes;
where gradients are handed to the parameters, those that took no part get none
(:mod:`autopar.runtime.gradients.taking_part`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOOK_PART = "autopar.took_part.default"

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("took_part(Tensor taken, Tensor[] parameters, int[] element) -> ()")
torch.library.register_fake("autopar::took_part", lambda *_: None, lib=_LIBRARY)
torch.fx.node.has_side_effect(torch.ops.autopar.took_part.default)


def took_part(taken: torch.Tensor, experts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Note, while a model is traced, whether experts take part.

    Args:
        taken: bool [experts], whether each has rows.
        experts: the parameters of each.
    """
    parameters = [(param, e) for e, params in enumerate(experts) for param in params]
    torch.ops.autopar.took_part(taken, [param for param, _ in parameters], [e for _, e in parameters])
