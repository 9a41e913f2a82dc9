"""Messages of a ring, and the exchange of halves (*zigzag*) that balances causal attention over ranks.

See :mod:`.ring_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.rules.attention.attention_call import Going
from autopar.rules.lowering_helpers.collective_helpers import permuted
from autopar.torch_private import each_rank

# --- several tensors as one message


def as_message(*tensors: torch.Tensor) -> torch.Tensor:
    """Write tensors [..] of one dtype one after the other into a message [n], each copied once."""
    message = tensors[0].new_empty(sum(x.numel() for x in tensors))
    for part, x in zip(parts_of(message, [x.shape for x in tensors]), tensors, strict=True):
        part.copy_(x)
    return message


def message_of_halves(*halves: torch.Tensor) -> torch.Tensor:
    """Return what :func:`as_message` makes of tensors whose dim -2 is given as first and second halves."""
    firsts, seconds = halves[::2], halves[1::2]
    shapes = [_shape_of_both(x) for x in firsts]
    message = firsts[0].new_empty(2 * sum(x.numel() for x in firsts))
    for part, first, second in zip(parts_of(message, shapes), firsts, seconds, strict=True):
        _put_together(part, first, second)
    return message


def add_to(message: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Add tensors to the parts of a message that :func:`as_message` wrote."""
    for part, x in zip(parts_of(message, [x.shape for x in tensors]), tensors, strict=True):
        part += x


def parts_of(message: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """View a message [n] as the tensors that :func:`as_message` wrote into it."""
    parts = message.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# --- halves


def exchanged(
    way: Going, tensors: Sequence[torch.Tensor], back: bool = False, from_next: bool = False
) -> Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Send halves of tensors [.. s ..] of one dtype along dim -2 to their places in zigzag order, or back.

    The function that is returned waits for both halves of each tensor.

    Of 2 n halves rank i has numbers 2 i and 2 i + 1 and gets i and 2 n - 1 - i: one of them is even, the other is odd,
    so each rank sends and receives one even and one odd half. On two ranks the even ones stay where they are.

    Args:
        from_next: a rank has the halves of the next one, as after the last step of a ring.
    """
    n, mine, shift = way.pieces, way.number, int(from_next)
    to_even, to_odd = ([_home(2 * i + odd, n) for i in range(n)] for odd in (0, 1))
    if back:
        to_even, to_odd = ([to.index((i + shift) % n) for i in range(n)] for to in (to_even, to_odd))
    halves = each_rank(_halves)((mine + shift) % n if back else 0, *tensors)
    even, odd = list(halves[: len(tensors)]), list(halves[len(tensors) :])
    arriving = _to_others(way, even, to_even), _to_others(way, odd, to_odd)

    def both_halves() -> list[tuple[torch.Tensor, torch.Tensor]]:
        even, odd = (wait() for wait in arriving)
        in_order = each_rank(_in_order)(0 if back else mine, *even, *odd)
        return list(zip(in_order[::2], in_order[1::2], strict=True))

    return both_halves


def _to_others(way: Going, tensors: list[torch.Tensor], to: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
    """Send tensors to rank ``to[i]`` of the ring's axis from rank i; what all of them keep is not sent."""
    if list(to) == list(range(way.pieces)):
        return lambda: tensors
    assert way.ring is not None
    wait = permuted(each_rank(as_message)(*tensors), way.ring, way.group, to)
    shapes = [x.shape for x in tensors]
    return lambda: parts_of(wait(), shapes)


def _home(half: int, n: int) -> int:
    return half if half < n else 2 * n - 1 - half


def _halves(number: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the halves of each tensor: in order on an even rank, exchanged on an odd one."""
    both = [x.chunk(2, -2) for x in tensors]
    return (*(x[number % 2] for x in both), *(x[1 - number % 2] for x in both))


def _in_order(number: int, *halves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return first and second half of each tensor from its even and odd one; on an odd rank the odd one is first."""
    both = zip(halves[: len(halves) // 2], halves[len(halves) // 2 :], strict=True)
    return tuple(x for pair in both for x in (pair if number % 2 == 0 else reversed(pair)))


def whole(first: torch.Tensor, second: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate both halves along dim -2; strides follow ``like`` where it has the same shape and dtype."""
    if like is None or like.shape != _shape_of_both(first) or like.dtype != first.dtype:
        return torch.cat([first, second], -2)
    return _put_together(torch.empty_like(like), first, second)


def _put_together(into: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    half = first.shape[-2]
    into[..., :half, :].copy_(first)
    into[..., half:, :].copy_(second)
    return into


def _shape_of_both(half: torch.Tensor) -> torch.Size:
    return torch.Size((*half.shape[:-2], 2 * half.shape[-2], half.shape[-1]))
