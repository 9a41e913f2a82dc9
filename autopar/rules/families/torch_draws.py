"""Random numbers of torch's generator on one device: drawn whole on every rank, which takes its part.

What :mod:`.sharded_random` draws does not depend on the mesh, and is not what a script has drawn before it was
parallelized. In this mode (``parallelize(..., random="torch")``) each rank draws every tensor of random numbers as
torch does in eager mode: of its whole shape, with the rows of all microbatches, in the memory layout that it has there,
and from the state in which eager mode's generator is then. So losses are eager mode's from the first step on, at the
price of drawing everything on every rank, twice.

The seed of such a program is a :class:`TorchDraws`: the states of the generator before each draw of a call, which are
found by going through all draws of the model in its order. Draws may then be made in any order, by any stage, and again
for the backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autopar.errors import CaptureError
from autopar.rules.attention.attention import attention_with_dropout
from autopar.rules.attention.attention_in_blocks import AttentionForm
from autopar.rules.attention.ring_attention import attention_across
from autopar.rules.families import random_distributions as drawing
from autopar.rules.families.branch import BRANCH
from autopar.rules.families.multinomial import multinomial, refuse_invalid
from autopar.rules.families.sharded_random import Shards, dropout, feature_dropout, in_batch
from autopar.rules.function import PREFIX
from autopar.rules.lowering_helpers.local_shard import Cuts, positions
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph, Node, Ref, RowsAt, Spec
from autopar.words.trees import PyTree


class WholeDraw(NamedTuple):
    """The draw of eager mode in one call: an in-place method of a new tensor.

    Attributes:
        method: its name, such as ``normal_``; ``randperm`` stands for ``torch.randperm``.
        numbers: its arguments.
        shape, strides: the tensor's; no strides if it is contiguous.
        rows: where the rows of the batch are in the draw.
    """

    method: str
    numbers: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    rows: tuple[RowsAt, ...] | None = ()

    def of_batch(self, rows: int | None) -> WholeDraw:
        """Return the draw of a batch of ``rows`` rows, of which this one is a microbatch's; None: this is the batch's.

        Raises:
            ValueError: it is not known where the rows are; or the tensor has gaps.
        """
        if rows is None or self.rows == ():
            return self
        if self.rows is None:
            raise ValueError("it is not known which elements of it belong to which row of the batch")
        shape = list(self.shape)
        for d, outer, _, inner in self.rows:
            if d < len(shape):
                shape[d] = outer * rows * inner
        order = sorted(range(len(shape)), key=lambda d: (-self.strides[d], d)) if self.strides else range(len(shape))
        if self.strides and [self.strides[d] for d in order] != _dense(self.shape, order):
            raise ValueError("it is drawn into a part of a tensor")
        dense = dict(zip(order, _dense(shape, order), strict=True))
        strides = tuple(dense[d] for d in range(len(shape))) if self.strides else ()
        return self._replace(shape=tuple(shape), strides=strides)

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Draw from the generator."""
        dtype, device = getattr(torch, self.dtype), generator.device
        if self.method == "randperm":
            return torch.randperm(self.shape[0], generator=generator, dtype=dtype, device=device)
        strides = self.strides or _dense(self.shape, range(len(self.shape)))
        empty = torch.empty_strided(self.shape, strides, dtype=dtype, device=device)
        made: torch.Tensor = getattr(empty, self.method)(*self.numbers, generator=generator)
        return made


def _dense(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the strides of a tensor without gaps, in the order of its dims, of which the first changes slowest."""
    return [math.prod(max(1, shape[d]) for d in order[k + 1 :]) for k in range(len(order))]


# --- what a call draws -----------------------------------------------------------------------------------------------


def whole_draw(node: Node, spec_of: Callable[[Ref], Spec]) -> WholeDraw | None:  # noqa: C901  (a case for each random operator)
    """Return what eager mode draws for a random operator; None if it draws nothing.

    Raises:
        CaptureError: it is not known how torch draws it.
    """
    target, shape, dtype = node.target.removeprefix("aten."), node.out.shape, node.out.dtype
    args = node.args

    def of(method: str, *numbers: Any, shape: tuple[int, ...] = shape, dtype: str = dtype, like: bool = True) -> Any:
        strides = node.strides if like and len(node.strides) == len(shape) else ()
        return WholeDraw(method, numbers, shape, strides, dtype, node.rows)

    def given(position: int, name: str, default: Any) -> Any:
        return args[position] if len(args) > position else node.kwargs.get(name, default)

    if target in ("dropout.default", "feature_dropout.default", "alpha_dropout.default",
                  "feature_alpha_dropout.default"):  # fmt: skip
        p = given(1, "p", 0.5)
        if p == 1 or 0 in shape:
            return None
        channels = (*shape[:2], *[1] * (len(shape) - 2))
        return of("bernoulli_", 1 - p, shape=channels, like=False) if "feature" in target else of("bernoulli_", 1 - p)
    if target == "scaled_dot_product_attention.default":
        scores = (*shape[:-1], spec_of(node.refs[1]).shape[-2])
        return of("bernoulli_", 1 - given(4, "dropout_p", 0.0), shape=scores, like=False)
    if target in ("rand.default", "rand_like.default"):
        return of("uniform_")
    if target in ("randn.default", "randn_like.default"):
        return of("normal_")
    if target in ("randint.default", "randint_like.default", "randint.low", "randint_like.low_dtype"):
        low, high = (0, args[target == "randint_like.default"])
        if "low" in target:
            low, high = args[:2] if target == "randint.low" else args[1:3]
        return of("random_", low, high)
    if target == "bernoulli.p":
        return of("bernoulli_", given(1, "p", 0.5))
    if target in ("bernoulli.default", "bernoulli.Tensor"):
        of_weights = spec_of(node.refs[-1]).dtype
        return of("uniform_", dtype="float64" if of_weights == "float64" else "float32")
    if target == "randperm.default":
        return of("randperm")
    if target.startswith("normal.") and target != "normal.float_float":
        return of("normal_")
    if target == "normal.float_float":
        return of("normal_", *args[:2])
    if target == "multinomial.default":
        weights = spec_of(node.refs[0])
        if given(1, "num_samples", 1) == 1 or not given(2, "replacement", False):
            strides = node.strides if len(node.strides) == len(weights.shape) else ()
            return WholeDraw("exponential_", (1,), weights.shape, strides, weights.dtype, node.rows)
        return of("uniform_", dtype="float64", like=False)
    method = _OVER.get(target)
    if method is None:
        raise CaptureError(f"{node.where} draws random numbers in a way that random='torch' does not know")
    return of(method, *args[1:], *(v for k, v in node.kwargs.items() if k in _NUMBERS))


_OVER = {
    "uniform.default": "uniform_", "normal_functional.default": "normal_", "log_normal.default": "log_normal_",
    "exponential.default": "exponential_", "cauchy.default": "cauchy_", "geometric.default": "geometric_",
    "random.default": "random_", "random.from": "random_", "random.to": "random_",
}  # fmt: skip
"""Operators that draw over a tensor, and how torch calls them."""
_NUMBERS = ("from", "to", "mean", "std", "lambd", "median", "sigma", "p")


_KNOWN = "draws in order"
_OTHERWISE_ON_GPUS = (
    "aten.dropout.", "aten.bernoulli.default", "aten.bernoulli.Tensor", "aten.multinomial.",
    "aten.scaled_dot_product_attention.",
)  # fmt: skip
"""Operators whose kernels on accelerators draw and compute at once, or draw in another order than torch's other
operators."""


def draws_in_order(graph: Graph, device_type: str = "cpu") -> dict[int, WholeDraw]:
    """List what eager mode draws in a call of the whole model, in its order, by number of the node.

    Args:
        device_type: where it runs in eager mode.

    Raises:
        CaptureError: something is drawn in a way that is not followed: it names it.
    """
    if _KNOWN in graph.derived:
        known: dict[int, WholeDraw] = graph.derived[_KNOWN]
        return known
    found: dict[int, WholeDraw] = {}
    for i, (node, rule) in enumerate(zip(graph.nodes, rules_of(graph), strict=True)):
        if node.target == BRANCH and len(node.args) == 3:
            raise CaptureError(
                f"forward branches on a random number at {node.where}, and random='torch' cannot say what the model "
                "draws then in eager mode, which depends on the number\n  parallelize it with random='sharded', the "
                "default: numbers of the same distribution, which do not depend on the mesh"
            )
        if rule is None or not rule.random:
            continue
        if node.target.startswith(PREFIX):
            raise CaptureError(
                f"{node.where} is code of its own that draws random numbers, which random='torch' cannot draw whole: "
                "draw them outside of it, or parallelize with random='sharded', the default"
            )
        if device_type != "cpu" and node.target.startswith(_OTHERWISE_ON_GPUS):
            raise CaptureError(
                f"{node.where} draws random numbers on {device_type} in a kernel of its own, which random='torch' "
                "cannot draw whole: give random='sharded', the default, or compare with eager mode on the CPU"
            )
        draw = whole_draw(node, graph.spec)
        if draw is not None:
            found[i] = draw
    graph.derived[_KNOWN] = found
    return found


@dataclass(frozen=True, eq=False)
class TorchDraws:
    """A stand-in for the seed of a call, or of a microbatch of it.

    Attributes:
        states: the states of the generator before each draw, by the ``site`` of the node, or its number without one.
        rows: the rows of the batch; None if the call is for all of it.
        place: the place of the rows of a microbatch in the batch, int64 [4], as
            :func:`~autopar.rules.families.sharded_random.seed_at` gives it.
    """

    states: Mapping[int, torch.Tensor]
    device: torch.device
    rows: int | None = None
    place: torch.Tensor | None = None

    def at(self, place: torch.Tensor) -> TorchDraws:
        """Return the draws of a microbatch."""
        return replace(self, place=place)

    def piece(self, site: Any, shards: Shards) -> torch.Tensor:
        """Return this rank's part of what a call draws.

        Args:
            shards: for each dim of what is drawn, the axes that cut it.
        """
        return self.at_places(
            site, [positions(n, axes, self.device) for n, axes in zip(site[1][2], shards, strict=True)]
        )

    def at_places(self, site: Any, places: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the elements of a call's draw at `places` along each dim."""
        draw = WholeDraw(*site[1])
        generator = torch.Generator(self.device)
        generator.set_state(self.states[site[0]])
        whole = draw.of_batch(self.rows).make(generator)
        if self.place is not None and draw.rows:
            places = in_batch(self.place, draw.rows, places)
        for d, place in enumerate(places):
            if place.numel() != whole.shape[d] or (self.place is not None and draw.rows):
                whole = whole.index_select(d, place)
        return whole


# --- operators -------------------------------------------------------------------------------------------------------


def _dropout(
    x: torch.Tensor, p: float, train: bool = True, *, seed: TorchDraws, site: Any, shards: Shards, **_: Any
) -> torch.Tensor:
    if site[1] is None:
        return x * 0.0
    return x * seed.piece(site, shards).div_(1 - p)


def _channels(shards: Shards) -> Shards:
    return (*shards[:2], *[()] * (len(shards) - 2))


def _feature_dropout(
    x: torch.Tensor, p: float, train: bool = True, *, seed: TorchDraws, site: Any, shards: Shards, **_: Any
) -> torch.Tensor:
    return _dropout(x, p, seed=seed, site=site, shards=_channels(shards))


def _alpha_dropout(
    x: torch.Tensor, p: float, train: bool = True, *, seed: TorchDraws, site: Any, shards: Shards, **_: Any
) -> torch.Tensor:
    return drawing.alpha(x, None if site[1] is None else seed.piece(site, shards), p)


def _feature_alpha_dropout(
    x: torch.Tensor, p: float, train: bool = True, *, seed: TorchDraws, site: Any, shards: Shards, **_: Any
) -> torch.Tensor:
    return drawing.alpha(x, None if site[1] is None else seed.piece(site, _channels(shards)), p)


def _drawn(*args: PyTree, seed: TorchDraws, site: Any, shards: Shards, **_: Any) -> torch.Tensor:
    """Return the draw itself as the result."""
    return seed.piece(site, shards)


def _bernoulli(
    x: torch.Tensor, p: Any = None, *, seed: TorchDraws, site: Any, shards: Shards, **_: Any
) -> torch.Tensor:
    if site[1][0] == "bernoulli_":
        return seed.piece(site, shards)
    return (seed.piece(site, shards) < (x if p is None else p).detach()).to(x.dtype)


def _normal_of(mean: Any, std: Any = 1.0, *, seed: TorchDraws, site: Any, shards: Shards, **_: Any) -> torch.Tensor:
    mean, std = (v.detach() if isinstance(v, torch.Tensor) else v for v in (mean, std))
    return seed.piece(site, shards) * std + mean


def _multinomial(
    weights: torch.Tensor, n_drawn: int, replacement: bool = False, *, seed: TorchDraws, site: Any, shards: Shards,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    weights = weights.detach()
    refuse_invalid(weights)
    drawn = seed.piece(site, (*shards[:-1], ()))
    if site[1][0] == "exponential_":
        return (weights / drawn).topk(n_drawn, dim=-1).indices
    sums = weights.cumsum(-1)
    sums = sums / sums[..., -1:]
    sums[..., -1] = 1  # as torch's kernel has it, whatever rounding leaves
    return torch.searchsorted(sums.double(), drawn).clamp(max=weights.shape[-1] - 1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, cut: Cuts, seed: TorchDraws, site: Any, shape: Sequence[int],
    shards: Shards,
) -> torch.Tensor:  # fmt: skip
    """Compute attention as torch composes it where probabilities are dropped."""
    # q [.. h q d], k [.. g k d], v [.. g k e] -> [.. h q e]
    kept = seed.piece(site, (*shards[:-1], ()))
    form = AttentionForm(is_causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, 0, 1 - dropout_p)
    return form.with_drop(q, k, v, attn_mask, kept.mul)


_BY_TORCH: dict[Callable[..., Any], Callable[..., Any]] = {
    dropout: _dropout, feature_dropout: _feature_dropout, drawing.alpha_dropout: _alpha_dropout,
    drawing.feature_alpha_dropout: _feature_alpha_dropout, drawing.bernoulli: _bernoulli,
    drawing.bernoulli_over: _bernoulli, drawing.normal_of: _normal_of, multinomial: _multinomial,
    attention_with_dropout: _attention, attention_across: attention_across,
}  # fmt: skip


@functools.cache
def by_torch(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a rank calls in place of a random operator's lowering when torch draws."""
    return _BY_TORCH.get(lowering, _drawn)
