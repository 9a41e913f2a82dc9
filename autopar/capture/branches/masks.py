"""``if mask.any(): out[mask] = f(x[mask])``: whether a mask selects any rows is no branch that matters.

Rows that a mask selects are computed for all positions (:mod:`autopar.capture.graph.selected_rows`), so a trace takes
the way on which they are used, also where the example has none, if the branch does nothing else (:mod:`.only_rows`).
While a model is run to record how it branches, this notes which questions are about the rows of a mask, and whether the
mask then selects.
"""

from __future__ import annotations

import torch

from autopar.words.trees import PyTree

COUNTS = {torch.Tensor.any, torch.any, torch.Tensor.sum, torch.sum, torch.count_nonzero, torch.Tensor.count_nonzero}
COMPARISONS = {
    getattr(torch.Tensor, f"__{name}__") for name in ("gt", "ge", "eq", "ne", "lt", "le")
} | {torch.Tensor.gt, torch.Tensor.eq, torch.Tensor.ne}  # fmt: skip
SELECTIONS = {torch.Tensor.__getitem__, torch.where, torch.Tensor.nonzero, torch.nonzero, torch.Tensor.__setitem__}


class MaskQuestions:
    """Questions about masks in one run of a model.

    Attributes:
        answers: by place, what was answered where the mask selected afterwards.
    """

    def __init__(self) -> None:
        self._mask_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of a tensor that was computed from a mask: that tensor, and the mask."""
        self._asked: dict[int, list[tuple[torch.Tensor, str, bool]]] = {}
        self.answers: dict[str, bool] = {}

    def computed(self, func: object, args: PyTree, result: PyTree) -> None:
        """Note a call of a function of torch."""
        if func in SELECTIONS:
            index = args[1] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else args[0]
            for x in index if isinstance(index, tuple) else (index,):
                for mask, site, answer in self._asked.get(id(x), ()):
                    if mask is x:
                        self.answers[site] = answer
        if not isinstance(result, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
            return
        if func in COUNTS and args[0].dtype == torch.bool and len(args) == 1:
            self._mask_of[id(result)] = result, args[0]
        elif func in COMPARISONS and id(args[0]) in self._mask_of:
            self._mask_of[id(result)] = result, self._mask_of[id(args[0])][1]

    def asked(self, tensor: torch.Tensor, site: str, answer: bool) -> None:
        """Note that Python was told whether a tensor is true."""
        computed, mask = self._mask_of.get(id(tensor), (None, None))
        if computed is tensor and mask is not None:
            self._asked.setdefault(id(mask), []).append((mask, site, answer))
