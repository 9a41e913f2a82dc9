"""A second batch with other values, padding and labels, on which constants of the first batch show."""

from __future__ import annotations

import torch

from autopar.torch_private import pytree
from autopar.words.trees import PyTree

IGNORED = -100
"""The label that losses of torch leave out."""
SEED = 1
"""The seed of the other batch: the same one each time."""


def other_batch(batch: PyTree, *, ignored: bool = True) -> PyTree:
    """Return a batch of the same structure, shapes and ranges.

    Floats are drawn with the mean and spread of the given ones; integers are shuffled, so they stay in range; masks (of
    zeros and ones, or bools, of two dims or more) get rows of different lengths; and labels, by their name, are ignored
    in a part of each row, unless ``ignored`` is False: not every loss supports it.
    """
    generator = torch.Generator().manual_seed(SEED)
    leaves, spec = pytree.tree_flatten_with_path(batch)
    drawn = [
        _other(pytree.keystr(path).lower(), leaf, generator, ignored) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves
    ]
    return pytree.tree_unflatten(drawn, spec)


def _other(name: str, x: torch.Tensor, generator: torch.Generator, ignored: bool) -> torch.Tensor:
    if x.is_complex() or not x.numel():
        return x
    if x.is_floating_point():
        wide = x.detach().double().cpu()
        spread = wide.std(correction=0) if wide.numel() > 1 else wide.abs().mean() + 1
        drawn = wide.mean() + spread * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return drawn.to(x.dtype).to(x.device).requires_grad_(x.requires_grad)
    if x.ndim >= 2 and bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any()):
        lengths = torch.randint(1, x.shape[-1] + 1, (*x.shape[:-1], 1), generator=generator)
        return (torch.arange(x.shape[-1]) < lengths).to(x.dtype).to(x.device)
    order = torch.randperm(x.numel(), generator=generator).to(x.device)
    shuffled = x.flatten()[order].reshape(x.shape)
    if ignored and x.ndim >= 2 and x.dtype == torch.int64 and ("label" in name or "target" in name):
        lengths = torch.randint(x.shape[-1] // 2, x.shape[-1] + 1, (*x.shape[:-1], 1), generator=generator)
        kept = (torch.arange(x.shape[-1]) < lengths).to(x.device)
        shuffled = torch.where(kept, shuffled, torch.full_like(shuffled, IGNORED))
    return shuffled
