"""Plain torch models that keep caches, and a loop that generates with them.

Two idioms are known, and have one form inside, buffers that forward changes:

* caches are buffers of the model: ``forward(tokens, positions)`` gives logits ``[rows, tokens, vocabulary]``;
* caches are handed in and given back: ``forward(tokens, positions, caches)`` gives ``(logits, caches)``, where caches
  are tensors, or lists, tuples and dicts of tensors, whose shapes stay.

``positions`` are where the tokens stand in their sequences, ``[tokens]`` or ``[rows, tokens]``, as in the example.
Nothing is known of how such a model masks, so a prompt is not filled up: it goes through in pieces whose lengths are
powers of two, the longest first, and a sequence of 37 tokens in pieces of 32, 4 and 1.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from autopar.errors import CaptureError, RunError, first_few
from autopar.inference.cache_calls import caches_here, draw_alike
from autopar.torch_private import pytree


class PassedCaches(torch.nn.Module):
    """A model that is handed its caches, as one that has them as buffers ``cache_0``, ``cache_1`` and so on.

    Args:
        model: called as ``model(tokens, positions, caches)``, gives ``(logits, caches)``.
        caches: an example of them; the buffers begin with zeros.
    """

    def __init__(self, model: torch.nn.Module, caches: Any) -> None:
        super().__init__()
        self.model = model
        leaves, self.form = pytree.tree_flatten(caches)
        self.count = len(leaves)
        for i, leaf in enumerate(leaves):
            self.register_buffer(f"cache_{i}", torch.zeros_like(leaf), persistent=False)

    def reset_parameters(self) -> None:
        """Empty the caches, of a model on the meta device too."""
        for i in range(self.count):
            getattr(self, f"cache_{i}").zero_()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits, and keep the caches."""
        caches = [getattr(self, f"cache_{i}") for i in range(self.count)]
        given = self.model(tokens, positions, pytree.tree_unflatten(caches, self.form))
        if not isinstance(given, tuple) or len(given) != 2:
            raise CaptureError(
                f"{type(self.model).__name__} is handed caches and gives {type(given).__name__} instead of (logits, "
                "caches): return both"
            )
        new, form = pytree.tree_flatten(given[1])
        if form != self.form or any(a.shape != b.shape for a, b in zip(new, caches, strict=True)):
            were = first_few([str(list(cache.shape)) for cache in caches])
            are = first_few([str(list(cache.shape)) for cache in new])
            raise CaptureError(
                f"{type(self.model).__name__} is handed caches of {were} and gives back {are}: caches of a program "
                "keep their shapes, so hand in tensors of the longest sequence and write at the positions"
            )
        for i, (cache, after) in enumerate(zip(caches, new, strict=True)):
            if after is not cache:
                getattr(self, f"cache_{i}").copy_(after)
        return given[0]  # type: ignore[no-any-return]


def changed_buffers(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...]
) -> tuple[tuple[str, ...], int | None]:  # fmt: skip
    """Return the names of the buffers that one forward changes, and how many tokens of a sequence they hold.

    The buffers are left as they were. The dim of tokens is the one in which exactly the example's positions are
    written; None where there are no positions or more than one such dim.

    Raises:
        CaptureError: a changed buffer does not begin with zeros, as it does at the beginning of each sequence.
    """
    before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in model.named_buffers()}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(*example)
    finally:
        model.train(training)
    after = dict(model.named_buffers())
    changed = [
        name for name, (buffer, version, _) in before.items()
        if after[name] is not buffer or after[name]._version != version
    ]  # fmt: skip
    lengths: set[int] = set()
    for name in changed:
        _, _, old = before[name]
        if not old.is_meta and bool(old.any()):
            raise CaptureError(
                f"buffer {name} of {type(model).__name__} changes in forward and does not begin with zeros, as a cache "
                "does at the beginning of every sequence: pass a model that has not been called"
            )
        if len(example) > 1 and not old.is_meta:
            lengths.update(_written_sizes(after[name], example[1]))
        with torch.no_grad():
            after[name].copy_(old)
    return tuple(changed), lengths.pop() if len(lengths) == 1 else None


def _written_sizes(cache: torch.Tensor, positions: torch.Tensor) -> set[int]:
    """Return the sizes of the dims of a cache, which was empty, that are written at exactly some positions."""
    at = {*positions.flatten().tolist()}
    written = cache.nonzero()
    return {size for dim, size in enumerate(cache.shape) if size > len(at) and {*written[:, dim].tolist()} == at}


class TokenLoop:
    """Generates tokens with a module called as ``module(tokens, positions)``.

    Args:
        module: the model, or what ``parallelize`` made of it.
        example: what it was captured with: tokens ``[rows, tokens]``, and positions.
        cache_names: its buffers that are caches.
        length: tokens that a cache holds of a sequence.
    """

    def __init__(
        self, module: Any, example: tuple[torch.Tensor, ...], cache_names: tuple[str, ...], length: int
    ) -> None:
        self.module, self.cache_names, self.length = module, cache_names, length
        self.rows = example[0].shape[0]
        self.positions = example[1] if len(example) > 1 else None

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, max_new_tokens: int = 20, *, do_sample: bool = False, temperature: float = 1.0,
        top_k: int | None = None, eos_token_id: int | None = None, pad_token_id: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Return prompts and what follows them, ``[rows, prompt + new]``; all ranks draw as the first one.

        Args:
            input_ids: prompts of equal length, int64 ``[rows, prompt]``.
            max_new_tokens: how many tokens are made.
            do_sample: draws them by torch's default generator; otherwise the likeliest ones.
            temperature: divides logits, for drawing.
            top_k: draws among so many of the likeliest tokens.
            eos_token_id: ends a row, which goes on with ``pad_token_id``; all rows ended end the loop.

        Raises:
            RunError: there are more rows or tokens than the caches hold.
        """
        rows, prompt = input_ids.shape
        self._check(rows, prompt, prompt + max_new_tokens)
        for cache in caches_here(self.module, self.cache_names):
            cache.zero_()
        draw_alike(input_ids.device)
        tokens, ended = input_ids, torch.zeros(rows, dtype=torch.bool, device=input_ids.device)
        logits = self._prompt(input_ids)
        for i in range(max_new_tokens):
            if i:
                logits = self._logits(tokens[:, -1:], prompt + i - 1)
            scores = logits.float()
            new = _drawn(scores / temperature, top_k) if do_sample else scores.argmax(-1)
            new = torch.where(ended, torch.full_like(new, pad_token_id), new)
            tokens = torch.cat([tokens, new[:, None]], dim=1)
            if eos_token_id is not None:
                ended = ended | (new == eos_token_id)
                if bool(ended.all()):
                    break
        return tokens

    def _check(self, rows: int, prompt: int, total: int) -> None:
        if rows > self.rows:
            raise RunError(f"{rows} prompts for caches of {self.rows} rows: pass fewer, or an example with as many")
        if prompt < 1 or total > self.length:
            raise RunError(
                f"a prompt of {prompt} and all new tokens are {total}, and the caches hold 1 to {self.length} of a "
                "sequence: generate fewer, or make the model with longer caches"
            )

    def _prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        for start, piece in pieces_of(tokens.shape[1]):
            logits = self._logits(tokens[:, start : start + piece], start)
        return logits

    def _logits(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Return the logits behind the last token, ``[rows, vocabulary]``."""
        rows, count = tokens.shape
        call = [torch.cat([tokens, tokens[:1].expand(self.rows - rows, -1)]).contiguous()]
        if self.positions is not None:
            at = torch.arange(start, start + count, dtype=self.positions.dtype, device=tokens.device)
            call.append(at if self.positions.ndim == 1 else at.expand(self.rows, -1).contiguous())
        logits: torch.Tensor = self.module(*call)
        return logits[:rows, -1]


def pieces_of(count: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, length)`` of the powers of two that make up a length, the longest first."""
    start = 0
    while start < count:
        piece = 1 << ((count - start).bit_length() - 1)
        yield start, piece
        start += piece


def _drawn(scores: torch.Tensor, top_k: int | None) -> torch.Tensor:
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1)[:, 0]


def given_generate(module: Any, kind: type, loop: TokenLoop) -> Any:
    """Give a module a ``generate``: that of its class, which calls it, or the loop's.

    Args:
        module: what ``parallelize`` made of a model, or the model.
        kind: the class that the model was written as.
    """
    own = getattr(kind, "generate", None)
    module.generate = loop.generate if own is None else types.MethodType(own, module)
    return module
