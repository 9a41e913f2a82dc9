"""Calls of a module with caches: filled up to the shapes that its programs have, and cut back.

A program has fixed shapes, so a call of fewer rows is filled up with copies of its first row, and a call of several
tokens up to a power of two, or to what is left of the cache. Tokens that fill up stand behind the others: what they
write into the cache is written over before it is attended to. There are hence at most ``log2(length)`` programs of
several tokens, each made when it is first needed, and one of a single token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.errors import RunError
from autopar.runtime.ranks.agree import share


def bucket_of(tokens: int, room: int) -> int:
    """Return how many tokens a call of some tokens is filled up to: a power of two, or all of the room.

    Args:
        tokens: new tokens of each row.
        room: places of the cache that are left.

    Raises:
        RunError: there is no room for the tokens.
    """
    if tokens > room:
        raise RunError(
            f"{tokens} more tokens do not fit into the cache, which has room for {room}: parallelize the model with a "
            "longer one (cache_length=)"
        )
    return min(1 << (tokens - 1).bit_length(), room)


class CacheCalls:
    """Calls of a module that has caches, of any number of rows and tokens that these hold.

    Args:
        module: a module called by tensors (:class:`~autopar.inference.cached_models.CachedModel`), or what
            ``parallelize`` made of it.
        rows, length: sequences of the cache, and tokens of each.
        cache_names: buffers of the module that are caches.
        positions: whether the model is told the numbers of its tokens.
        encoder: the module of an encoder, called by its inputs.
    """

    def __init__(
        self, module: Any, rows: int, length: int, cache_names: tuple[str, ...], positions: bool = True,
        encoder: Any = None,
    ) -> None:  # fmt: skip
        self.module, self.rows, self.length, self.cache_names = module, rows, length, cache_names
        self.positions, self.encoder = positions, encoder
        self.holder: object | None = None

    def begin(self, holder: object) -> None:
        """Empty the caches for a new holder: the one whose tokens are in them."""
        self.holder = holder
        with torch.no_grad():
            for cache in caches_here(self.module, self.cache_names):
                cache.zero_()

    def check_holder(self, holder: object) -> None:
        """Refuse a call on caches that have been given to another one since.

        Raises:
            RunError: it says what to do.
        """
        if self.holder is not holder:
            raise RunError(
                "this cache is not in the model any more: another call of generate, or of forward without a cache, has "
                "begun since, and a model on ranks has one cache. Generate from the whole sequence, or go on with a "
                "cache before the next call"
            )

    def check_rows(self, rows: int) -> None:
        """Refuse more sequences than the caches have.

        Raises:
            RunError: with both numbers.
        """
        if rows > self.rows:
            raise RunError(
                f"{rows} sequences at once (rows times beams or samples of each), and the cache has {self.rows}: pass "
                "fewer at a time, or parallelize the model with an example of as many rows"
            )

    def advance(
        self,
        tokens: torch.Tensor,
        start: int,
        positions: torch.Tensor | None,
        masks: Mapping[str, torch.Tensor],
        source: Mapping[str, torch.Tensor],
        every: bool = False,
    ) -> torch.Tensor:
        """Return the logits behind the last token of each row, ``[rows, 1, vocabulary]``, or behind every one.

        Args:
            tokens: new tokens ``[rows, tokens]``.
            start: tokens that are in the cache of each row.
            positions: numbers of the tokens in their sequences ``[rows, tokens]``, or None.
            masks: ``mask`` and maybe ``window_mask``, of ``[rows, 1, tokens, length]``.
            source: ``source_states`` and ``source_mask`` of a model with an encoder, first dim rows.
            every: gives ``[rows, tokens, vocabulary]``, by programs of their own.
        """
        rows, count = tokens.shape
        self.check_rows(rows)
        more = bucket_of(count, self.length - start) - count
        places = torch.arange(start, start + count + more, device=tokens.device).expand(rows, -1)
        wanted = torch.arange(count + more, device=tokens.device) if every else torch.tensor([count - 1]).to(tokens)
        call = {
            "tokens": _behind(tokens, more, 1), "places": places, "last": wanted.expand(rows, -1),
            **{name: _behind(visible(mask), more, 2) for name, mask in masks.items()}, **source,
        }  # fmt: skip
        if positions is not None:
            call["positions"] = _behind(positions, more, 1)
        return self._called(call)[:rows, : count if every else 1]

    def step(self, tokens: torch.Tensor, held: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Advance each sequence by tokens of its own, as an engine does, and return logits ``[rows, vocabulary]``.

        Rows are the slots of the cache. A row of which ``counts`` is 0 keeps what it holds. What a row holds is what
        its caller says: with ``held`` 0 a slot begins anew.

        Args:
            tokens: int64 ``[rows, tokens]``; of a row the first ``counts`` are meant, the others are any.
            held: tokens that each row has in the cache, int64 ``[rows]``.
            counts: new tokens of each row, int64 ``[rows]``.

        Returns:
            Logits behind the last new token of each row; of a row without one they mean nothing.

        Raises:
            RunError: there are other rows than the cache has, or no room for the tokens.
        """
        if not self.positions:
            raise RunError(
                "rows at places of their own need a model that is told the numbers of its tokens (position_ids), and "
                "this one counts them itself: advance all rows alike, by generate"
            )
        rows, width = tokens.shape
        if rows != self.rows:
            raise RunError(f"step was called with {rows} rows, and the cache has {self.rows}: pass one for each slot")
        most, widest = int(held.max()), int(counts.max())
        if widest > width or most + width > self.length:
            raise RunError(
                f"a step of {width} tokens, of which a row has {widest} new ones, behind up to {most} in a cache of "
                f"{self.length}: pass all new tokens, and as many places as a step is wide (cache_length=), since "
                "rows with fewer are filled up behind what they hold"
            )
        self.holder = None
        places = held[:, None] + torch.arange(width, device=tokens.device)
        mask = torch.arange(self.length, device=tokens.device) <= places[:, :, None]
        call = {
            "tokens": tokens, "places": places, "positions": places, "mask": mask[:, None],
            "last": (counts - 1).clamp(min=0)[:, None],
        }  # fmt: skip
        return self._called(call)[:, 0]

    def encode(self, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the encoder's output for inputs of at most as many rows as the cache has."""
        rows = next(iter(source.values())).shape[0]
        self.check_rows(rows)
        with torch.no_grad():
            states: torch.Tensor = self.encoder(**{name: self._filled(tensor) for name, tensor in source.items()})
        return states[:rows]

    def permute(self, rows: torch.Tensor) -> None:
        """Move sequences: row ``i`` of the caches becomes what row ``rows[i]`` was.

        Args:
            rows: int64 ``[rows]``, the same on all ranks.
        """
        self.check_rows(len(rows))
        every = torch.cat([rows, torch.arange(len(rows), self.rows, device=rows.device)])
        with torch.no_grad():
            for cache in caches_here(self.module, self.cache_names):
                if isinstance(cache, DTensor):
                    _permute_parts(cache, every)
                else:
                    cache.copy_(cache.index_select(0, every))

    def _called(self, call: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return self.module(**{name: self._filled(tensor) for name, tensor in call.items()})  # type: ignore[no-any-return]

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of as many rows as the cache has."""
        more = self.rows - tensor.shape[0]
        filled = torch.cat([tensor, tensor[:1].expand(more, *tensor.shape[1:])]) if more > 0 else tensor
        return filled.contiguous()


def caches_here(module: torch.nn.Module, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the caches of these names that this rank has: in a pipeline those of its stages."""
    buffers = dict(module.named_buffers())
    return [buffers[name] for name in names if name in buffers]


def _permute_parts(cache: DTensor, rows: torch.Tensor) -> None:
    """Move rows of a cache in pieces: within each rank's piece, or all of them where the rows themselves are cut."""
    local = cache.to_local()
    if not any(placement.is_shard(0) for placement in cache.placements):
        local.copy_(local.index_select(0, rows))
        return
    whole = cache.full_tensor().index_select(0, rows)
    local.copy_(distribute_tensor(whole, cache.device_mesh, cache.placements, src_data_rank=None).to_local())


def _behind(tensor: torch.Tensor, more: int, dim: int) -> torch.Tensor:
    """Return a tensor with its last entry along a dim several times more."""
    if more == 0:
        return tensor
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    return torch.cat([tensor, last.expand(*(more if i == dim else -1 for i in range(tensor.ndim)))], dim)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask in which every token attends to something: one that fills up on the left may attend to none.

    The softmax over nothing is no number, and what such a token writes into the cache would be none, either. Nothing
    attends to it.
    """
    if mask.dtype != torch.bool:
        return mask
    empty = ~mask.any(-1, keepdim=True)
    first = torch.arange(mask.shape[-1], device=mask.device) == 0
    return mask | (empty & first)


def draw_alike(device: torch.device) -> None:
    """Give the state of the first rank's default generators to all ranks, so that all draw the same tokens."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    told = share(None, " ".join(bytes(state.tolist()).hex() for state in states), None)
    states = [torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in told.split()]
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
