"""``flex_attention`` becomes attention of plain operators, so that rules see its batch, heads, queries and keys.

``torch.nn.attention.flex_attention`` is a higher-order operator: functions say for one query and one key whether they
meet (``mask_mod``) and what becomes of their score (``score_mod``). Torch checks the call and prepares it as ever; what
is exchanged is the operator below. Without a ``score_mod`` it becomes ``scaled_dot_product_attention``: causal where
the ``mask_mod`` says ``q >= k`` and nothing else, and else with a mask of booleans, of the batch and heads that the
block mask was created for. So documents that are packed into one row are a comparison of their numbers, of which each
rank makes its own rows, and queries, keys and a ring are cut as under any mask. With a ``score_mod`` the scores are a
tensor of their own. Masks are whole: nothing that they hide is skipped, unlike in torch's kernels.

The block mask itself, which tells fused kernels what they may skip, is read by nobody and vanishes from the graph.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autopar.capture.trace.patches import Function, Patch, Phase, register
from autopar.errors import CaptureError
from autopar.torch_private import FLEX_NAMES, compiled_functions_run_as_they_are, pytree
from autopar.words.trees import PyTree

MODULE = "torch.nn.attention.flex_attention"


@contextlib.contextmanager
def flex_attention_in_plain_operators() -> Iterator[None]:
    """Run ``flex_attention`` as plain operators, which have a backward on every device.

    Code that has imported the function has the same function: what changes are names that it looks up when it runs.
    """
    module: Any = sys.modules.get(MODULE)
    if module is None:  # nobody in this process can call it
        yield
        return
    with (
        mock.patch.object(module, FLEX_NAMES.operator, _attention),
        mock.patch.object(module, FLEX_NAMES.refuses_devices, lambda *_: None),
        mock.patch.object(module, FLEX_NAMES.runs_uncompiled, True),
        mock.patch.object(module, "create_mask", _of_blocks),
        mock.patch.object(module, FLEX_NAMES.turned_blocks, lambda *of_queries: of_queries),
        compiled_functions_run_as_they_are(),
    ):
        yield


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Function, block_mask: Any,
    scale: float, kernel_options: Any, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute the operator: its result, and the log-sum-exp and largest score of each query, in powers of two.

    ``query``, ``key``, ``value``: [b h q d], [b g k d], [b g k e]; g divides h. ``block_mask``: as torch hands it on:
    its third element has the batch and heads of the mask, its last is the ``mask_mod``.
    """
    module: Any = sys.modules[MODULE]
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    mask_mod, of_blocks = block_mask[-1], block_mask[2]
    has_mask = mask_mod is not module.noop_mask
    is_plain = score_mod is getattr(module, FLEX_NAMES.same_score)
    is_causal = has_mask and is_plain and query.shape[-2] == key.shape[-2] and says_causal(mask_mod)
    mask = None
    if has_mask and not is_causal:
        sizes = (*of_blocks.shape[:2], query.shape[-2], key.shape[-2])
        mask = _everywhere(mask_mod, sizes, query.device)
    scores = _scores(query, key, score_mod, mask, scale, is_causal)
    if is_plain:
        out = scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        out = torch.matmul(_probabilities(scores).to(value.dtype), _wide(value, query)).to(query.dtype)
    in_powers_of_two = 1 / math.log(2)
    return out, scores.logsumexp(-1) * in_powers_of_two, scores.amax(-1) * in_powers_of_two


def _wide(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values as often as heads of queries share them."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, score_mod: Function, mask: torch.Tensor | None, scale: float,
    is_causal: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the argument of the softmax, [b h q k], in float32 or more; unread it leaves the graph."""
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(exact), _wide(key, query).to(exact).transpose(-2, -1)) * scale
    if score_mod is not getattr(sys.modules[MODULE], FLEX_NAMES.same_score):
        scores = _everywhere(score_mod, scores.shape, scores.device, scores).expand(scores.shape).to(exact)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores; zeros for a query that sees no key, and no gradient."""
    is_blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(is_blind, 0.0), -1).masked_fill(is_blind, 0.0)


def _of_blocks(
    mod_fn: Function, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> torch.Tensor:
    """Stand in for torch's ``create_mask``, for block masks that are made in a forward: nobody reads the blocks."""
    sizes = (B or 1, H or 1, Q_LEN, KV_LEN)
    return torch.ones(sizes, dtype=torch.bool, device=device)


# --- functions of one query and one key, for all of them at once

ELEMENTWISE = frozenset(
    """abs add and bitwise_and bitwise_not bitwise_or bitwise_xor bool clamp clamp_max clamp_min cos div double eq exp
    exp2 float floor floor_divide floordiv fmod ge gt int invert isfinite isinf isnan isneginf le log log2 logical_and
    logical_not logical_or logical_xor long lt maximum minimum mod mul ne neg or pow relu remainder rsqrt sigmoid sign
    sin sqrt square sub tanh to true_divide truediv type type_as where xor zeros_like ones_like full_like""".split()
)
"""Functions of tensors that work on each element by itself."""
OF_NO_ELEMENT = frozenset("new_zeros new_ones new_full new_tensor dim size is_floating_point".split())
"""Functions that read no element of the tensor that they are called on."""


def _everywhere(
    function: Function, sizes: Sequence[int], device: Any, score: torch.Tensor | None = None
) -> torch.Tensor:
    """Call a ``mask_mod`` or ``score_mod`` for every query and key at once.

    Torch calls it for one element at a time, in a vmap. Here it is called once with indices that broadcast, [b 1 1 1],
    [1 h 1 1], [1 1 q 1] and [1 1 1 k], which is the same where it works on each element by itself; what a mask does not
    depend on stays of size 1 in it.

    ``sizes``: b, h, q and k. ``score``: [b h q k], for a ``score_mod``.
    """
    places = [
        torch.arange(n, device=device).reshape([n if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes)
    ]
    given = places if score is None else [score, *places]
    with _ElementByElement(function, given):
        result = function(*given)
    if not isinstance(result, torch.Tensor):
        result = torch.full((1, 1, 1, 1), result, device=device)
    return result.reshape((1,) * (4 - result.dim()) + tuple(result.shape))


class _ElementByElement(TorchFunctionMode):
    """A mode in which a function works on elements in four dims as if it had one of them."""

    def __init__(self, function: Function, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.of_elements = list(given)  # what follows from the arguments; kept, so that no identity is used twice

    def __torch_function__(self, func: Function, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(map(self._is_of_elements, tensors)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if func is torch.Tensor.__getitem__:
            result = self._indexed(args[0], args[1])
        elif name in ELEMENTWISE or (name[:1] in ("r", "i") and name[1:] in ELEMENTWISE):
            result = func(*args, **kwargs)
        elif name in OF_NO_ELEMENT:
            return func(*args, **kwargs)
        elif name == "get" and not isinstance(func(*args, **kwargs), torch.Tensor):  # its dtype, its device
            return func(*args, **kwargs)
        else:
            raise self._refused(f"calls '{name}'")
        self.of_elements.append(result)
        return result

    def _is_of_elements(self, x: torch.Tensor) -> bool:
        return any(x is each for each in self.of_elements)

    def _indexed(self, x: torch.Tensor, index: PyTree) -> torch.Tensor:
        indices = list(index) if isinstance(index, (tuple, list)) else [index]
        by_numbers = all(isinstance(i, (torch.Tensor, int)) and not isinstance(i, bool) for i in indices)
        if not by_numbers or len(indices) != x.dim() or self._is_of_elements(x):
            raise self._refused(f"indexes a tensor of {x.dim()} dims with {len(indices)} indices")
        tensors = [i if isinstance(i, torch.Tensor) else torch.tensor(i, device=x.device) for i in indices]
        return torch.ops.aten.index(x, tensors)  # type: ignore[no-any-return]

    def _refused(self, what: str) -> CaptureError:
        code = getattr(self.function, "__code__", None)
        at = f", at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        return CaptureError(
            f"a function that flex_attention is given {what}{at}: what it says must follow element by element from "
            "its score and indices\n  compute with operators, torch.where and tensors that are indexed in all of their "
            "dims; what it needs of whole rows compute before, in forward()"
        )


# --- what a mask_mod says, where it says little


class _Seen(NamedTuple):
    """A comparison of two places."""

    relation: str
    left: str
    right: str


class _Place:
    """A stand-in for the index of a query or a key, which knows comparisons and nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _compared(self, other: object, relation: str) -> _Seen:
        if not isinstance(other, _Place):
            raise TypeError("compared with something else")
        return _Seen(relation, self.name, other.name)

    def __ge__(self, other: object) -> _Seen:
        return self._compared(other, ">=")

    def __le__(self, other: object) -> _Seen:
        return self._compared(other, "<=")


def says_causal(mask_mod: Function) -> bool:
    """Check that a ``mask_mod`` is ``q >= k``, and nothing else."""
    try:
        result = mask_mod(_Place("b"), _Place("h"), _Place("q"), _Place("k"))
    except Exception:  # it does what only tensors can: whatever that raises, it is not the plain comparison
        return False
    return isinstance(result, _Seen) and result in (_Seen(">=", "q", "k"), _Seen("<=", "k", "q"))


register(
    Patch(
        "flex attention", "its higher-order operator has functions of one query and one key that rules cannot see",
        lambda _record: flex_attention_in_plain_operators(), Phase.TRACE | Phase.COMPARE,
    )
)  # fmt: skip
