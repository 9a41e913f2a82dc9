"""Operators that draw a tensor from a distribution, new or over an old one, numbers as in :mod:`.sharded_random`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.rules.families.sharded_random import Shards, Site, bernoulli, bits, kept, rand, randint, randn, uniform
from autopar.rules.lowering_helpers.local_shard import Cuts
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.words.trees import PyTree

_ALPHA = 1.7580993408473766


def _given(args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *names: tuple[str, Any]) -> list[Any]:
    """Return arguments by position or name, or their defaults."""
    return [args[i] if i < len(args) else kwargs.get(name, default) for i, (name, default) in enumerate(names)]


def _unit(x: torch.Tensor, draw: dict[str, Any]) -> torch.Tensor:
    """Draw uniform numbers in (0, 1) in the shape of ``x``."""
    u = uniform(draw["seed"], draw["site"], draw["shape"], draw["shards"], x.device, torch.float32)
    return u + 2.0**-25


def _normal(x: torch.Tensor, draw: dict[str, Any]) -> torch.Tensor:
    return randn(x, cut=None, **draw)


def uniform_over(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> Any:
    """Draw for ``aten.uniform``, the result of ``x.uniform_(low, high)``."""
    low, high = _given(args, kwargs, ("from", 0.0), ("to", 1.0))
    return rand(x, cut=cut, seed=seed, site=site, shape=shape, shards=shards) * (high - low) + low


def normal_over(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> Any:
    """Draw for ``aten.normal_functional``, the result of ``x.normal_(mean, std)``."""
    mean, std = _given(args, kwargs, ("mean", 0.0), ("std", 1.0))
    return randn(x, cut=cut, seed=seed, site=site, shape=shape, shards=shards) * std + mean


def log_normal_over(x: torch.Tensor, *args: PyTree, cut: Cuts, **rest: Any) -> PyTree:
    """Draw for ``aten.log_normal``, with mean 1 and deviation 2 by default."""
    names = ("seed", "site", "shape", "shards")
    mean, std = _given(args, rest, ("mean", 1.0), ("std", 2.0))
    return (_normal(x, {k: rest[k] for k in names}) * std + mean).exp()


def exponential_over(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards, **rest: Any
) -> Any:
    """Draw for ``aten.exponential``, by inversion."""
    (rate,) = _given(args, rest, ("lambd", 1.0))
    return (-_unit(x, {"seed": seed, "site": site, "shape": shape, "shards": shards}).log() / rate).to(x.dtype)


def cauchy_over(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> Any:
    """Draw for ``aten.cauchy``, by inversion."""
    median, sigma = _given(args, kwargs, ("median", 0.0), ("sigma", 1.0))
    u = _unit(x, {"seed": seed, "site": site, "shape": shape, "shards": shards})
    return (torch.tan(math.pi * (u - 0.5)) * sigma + median).to(x.dtype)


def geometric_over(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> Any:
    """Draw for ``aten.geometric``: the number of trials until the first success."""
    (p,) = _given(args, kwargs, ("p", 0.5))
    u = _unit(x, {"seed": seed, "site": site, "shape": shape, "shards": shards})
    return (u.log() / math.log1p(-p)).ceil().clamp(min=1).to(x.dtype)


_FINE = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def integers_over(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> Any:
    """Draw for ``aten.random``: integers below ``to``, or in ``[from, to)``.

    With neither given, integers up to what ``x`` holds exactly, of at most 31 bits.
    """
    most = 2 ** min(_FINE[x.dtype], 31) if x.dtype in _FINE else 2 if x.dtype == torch.bool else min(
        torch.iinfo(x.dtype).max, 2**31 - 1) + 1  # fmt: skip
    low, high = (0, most) if not args else (0, args[0]) if len(args) == 1 else args[:2]
    drawn = randint(low, high if high is not None else most, shape, cut=cut, seed=seed, site=site, shape=shape,
                    shards=shards, device=x.device)  # fmt: skip
    return drawn.to(x.dtype)


def integers_like(
    x: torch.Tensor, *args: PyTree, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards,
    **kwargs: PyTree,
) -> Any:
    """Draw for ``aten.randint_like`` with ``(high)`` or ``(low, high)``."""
    low, high = (0, args[0]) if len(args) == 1 else args[:2]
    dtype = kwargs.get("dtype") or x.dtype
    draw = {"cut": cut, "seed": seed, "site": site, "shape": shape, "shards": shards}
    return randint(low, high, shape, dtype=dtype, device=x.device, **draw)


def bernoulli_over(
    x: torch.Tensor, p: Any = 0.5, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards, **_: Any
) -> Any:
    """Draw for ``aten.bernoulli.Tensor``, the result of ``x.bernoulli_(p)`` with a tensor of probabilities."""
    u = uniform(seed, site, shape, shards, x.device, torch.float32)
    return (u < p.detach()).to(x.dtype)


def permutation(
    n: int, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int], shards: Shards, **kwargs: PyTree
) -> torch.Tensor:
    """Draw for ``aten.randperm``: the order of as many random numbers."""
    device = torch.device(kwargs.get("device") or seed.device)
    return bits(seed, site, shape, ((),), device).argsort(stable=True).to(kwargs.get("dtype") or torch.int64)


def normal_of(mean: Any, std: Any = 1.0, *, cut: Cuts, **draw: Any) -> torch.Tensor:
    """Draw for ``aten.normal`` where mean or deviation is a tensor; no gradient flows to them, as in torch."""
    like = mean if isinstance(mean, torch.Tensor) else std
    mean, std = (v.detach() if isinstance(v, torch.Tensor) else v for v in (mean, std))
    return _normal(like, {k: draw[k] for k in ("seed", "site", "shape", "shards")}) * std + mean


def normal_made(mean: float, std: float, *_: Any, cut: Cuts, **rest: Any) -> torch.Tensor:
    """Draw for ``aten.normal.float_float``, which makes a new tensor."""
    return randn(None, cut=cut, **rest) * std + mean


def alpha_dropout(
    x: torch.Tensor, p: float, train: bool = True, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int],
    shards: Shards,
) -> torch.Tensor:
    """Draw for ``aten.alpha_dropout``, which preserves mean and variance."""
    return alpha(x, kept(p, seed, site, shape, shards, x.device), p)


def feature_alpha_dropout(
    x: torch.Tensor, p: float, train: bool = True, *, cut: Cuts, seed: Any, site: Site, shape: Sequence[int],
    shards: Shards,
) -> torch.Tensor:
    """Draw for ``aten.feature_alpha_dropout``: whole channels of x [b c ...]."""
    mask = kept(p, seed, site, shape[:2], shards[:2], x.device)
    return alpha(x, mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), p)


def alpha(x: torch.Tensor, mask: torch.Tensor | None, p: float) -> torch.Tensor:
    """Return ``x`` where the mask is 1, else the value that preserves mean and variance; no mask drops all."""
    if p == 1 or mask is None:
        return x * 0.0
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return x * (mask * scale) + ((mask.to(x.dtype) - 1) * (_ALPHA * scale) + _ALPHA * scale * p)


DRAWS: dict[str, Callable[..., Any]] = {
    "rand.default": rand, "randn.default": randn, "rand_like.default": rand, "randn_like.default": randn,
    "randint.default": randint, "randint.low": randint, "randint_like.default": integers_like,
    "randint_like.low_dtype": integers_like, "bernoulli.default": bernoulli, "bernoulli.p": bernoulli,
    "bernoulli.Tensor": bernoulli_over, "uniform.default": uniform_over, "normal_functional.default": normal_over,
    "log_normal.default": log_normal_over, "exponential.default": exponential_over, "cauchy.default": cauchy_over,
    "geometric.default": geometric_over, "random.default": integers_over, "random.from": integers_over,
    "random.to": integers_over, "randperm.default": permutation, "normal.Tensor_float": normal_of,
    "normal.float_Tensor": normal_of, "normal.Tensor_Tensor": normal_of, "normal.float_float": normal_made,
}  # fmt: skip
"""What draws for an operator, in whole and in parts alike."""


@rule(*(f"aten.{name}" for name in DRAWS))
def draw(call: Call) -> Rule:
    fn = DRAWS[call.target.removeprefix("aten.")]
    if call.ins:
        terms = ", ".join(["..."] * len(call.ins))
        return line(f"{terms} -> ...", call, random=True, lowerings=(Lowering(fn),))
    out = " ".join("1" if n == 1 else name for n, name in zip(call.out.shape, "abcdefgh", strict=False))
    whole = out if fn is permutation else ""  # where an element goes depends on all others
    return line(f"-> {out}", call, random=True, lowerings=(Lowering(fn),), whole=whole)


@rule("aten.alpha_dropout.default", "aten.feature_alpha_dropout.default")
def alpha_rule(call: Call) -> Rule:
    p, train = call.arg(1, "p", 0.5), call.arg(2, "train", True)
    draws = bool(train) and p > 0
    fn = alpha_dropout if call.target == "aten.alpha_dropout.default" else feature_alpha_dropout
    return line("... -> ...", call, random=draws, lowerings=(Lowering(fn),) if draws else ())


_X = T((4, 8), grad=False)
prove_with("aten.rand.default", sample([4, 8]), sample([8], dtype=torch.float64))
prove_with("aten.randn.default", sample([4, 8], dtype=torch.float64))
prove_with("aten.rand_like.default", sample(T((4, 8))))
prove_with("aten.randn_like.default", sample(T((4, 8))))
prove_with("aten.randint.default", sample(10, [4, 8]))
prove_with("aten.randint.low", sample(-3, 10, [4, 8]))
prove_with("aten.randint_like.default", sample(_X, 10))
prove_with("aten.randint_like.low_dtype", sample(T((4, 8), "int64", 9), -3, 10))
prove_with("aten.bernoulli.p", sample(_X, 0.3))
prove_with("aten.bernoulli.default", sample(T((4, 6), low=0.1, high=0.9, grad=False)))
prove_with("aten.bernoulli.Tensor", sample(T((4, 6), grad=False), T((6,), low=0.1, high=0.9, grad=False)))
prove_with("aten.uniform.default", sample(_X, -1.0, 2.0), sample(_X))
prove_with("aten.normal_functional.default", sample(_X, 1.0, 0.5), sample(_X))
prove_with("aten.log_normal.default", sample(_X, 0.0, 0.5))
prove_with("aten.exponential.default", sample(_X, 2.0), sample(_X))
prove_with("aten.cauchy.default", sample(_X, 1.0, 0.5))
prove_with("aten.geometric.default", sample(_X, 0.3))
prove_with("aten.random.default", sample(_X), sample(T((4, 8), "int64", 5)))
prove_with("aten.random.from", sample(_X, -3, 10))
prove_with("aten.random.to", sample(_X, 10))
prove_with("aten.randperm.default", sample(8))
prove_with("aten.normal.Tensor_float", sample(_X, 0.5), sample(_X))
prove_with("aten.normal.float_Tensor", sample(1.0, T((4, 8), low=0.5, grad=False)))
prove_with("aten.normal.Tensor_Tensor", sample(_X, T((8,), low=0.5, grad=False)))
prove_with("aten.normal.float_float", sample(1.0, 0.5, [4, 8], dtype=torch.float64))
prove_with("aten.alpha_dropout.default", sample(T((4, 8)), 0.5, True), sample(T((4, 8)), 0.5, False))
prove_with("aten.feature_alpha_dropout.default", sample(T((4, 4, 3)), 0.5, True))
prove_with("aten.feature_dropout.default", sample(T((4, 4, 3, 3)), 0.5, True))
