"""How an engine would call a model on ranks: slots, requests that come when one is free, one program for all slots.

Run it with ``python examples/continuous_batching.py``, which starts two ranks, or with ``torchrun``. There is no server
here; engines have one. What is shown is the call, ``model.calls.step(tokens, held, counts)``: every slot of the cache
advances by tokens of its own, at a place of its own. A new request's prompt goes through in chunks beside the tokens
that the other slots decode, so nobody waits for a long prompt, and there are two programs in all: of a chunk, and of a
single token.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.ranks.launch import run_local

SLOTS, CHUNK, LENGTH = 4, 8, 96


@dataclass
class Request:
    """A prompt, and what has become of it.

    Attributes:
        arrives: the step before which it is not there.
        most: tokens that are made of it.
    """

    prompt: list[int]
    most: int
    arrives: int = 0
    made: list[int] = field(default_factory=list)


@dataclass
class Slot:
    """A row of the cache, and the request that it is of.

    Attributes:
        held: tokens of the request that are in the cache.
    """

    request: Request
    held: int = 0

    def next_tokens(self) -> list[int]:
        """Return what goes through next: a chunk of the prompt, or the token that was made last."""
        known = self.request.prompt + self.request.made
        return known[self.held : self.held + CHUNK]

    @property
    def done(self) -> bool:
        """Whether all tokens are made."""
        return len(self.request.made) >= self.request.most


class Batcher:
    """Serves requests with the slots of one model.

    Args:
        model: what ``parallelize(mode="inference")`` gave.
        ends: a token that ends an answer.
    """

    def __init__(self, model: transformers.PreTrainedModel, ends: int | None = None) -> None:
        self.calls, self.ends = model.calls, ends
        self.slots: list[Slot | None] = [None] * self.calls.rows
        self.steps = 0

    def serve(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield each request when it is finished."""
        waiting = deque(sorted(requests, key=lambda one: one.arrives))
        while waiting or any(self.slots):
            self._admit(waiting)
            if any(self.slots):
                yield from self._step()
            self.steps += 1

    def _admit(self, waiting: deque[Request]) -> None:
        """Give free slots to those that have waited longest."""
        for i, slot in enumerate(self.slots):
            if slot is None and waiting and waiting[0].arrives <= self.steps:
                request = waiting.popleft()
                longest = len(request.prompt) + request.most + CHUNK
                if longest > self.calls.length:
                    raise ValueError(f"a request of {longest} tokens, and a slot has {self.calls.length}")
                self.slots[i] = Slot(request)

    def _step(self) -> Iterator[Request]:
        """Advance all slots by one call of the model."""
        new = [slot.next_tokens() if slot else [] for slot in self.slots]
        width = CHUNK if max(map(len, new)) > 1 else 1
        tokens = torch.tensor([one + [0] * (width - len(one)) for one in new])
        held = torch.tensor([slot.held if slot else 0 for slot in self.slots])
        counts = torch.tensor([len(one) for one in new])
        best = self.calls.step(tokens, held, counts).argmax(-1).tolist()
        for i, slot in enumerate(self.slots):
            if slot is None:
                continue
            slot.held += len(new[i])
            if slot.held < len(slot.request.prompt):
                continue  # in the middle of its prompt
            slot.request.made.append(best[i])
            if slot.done or best[i] == self.ends:
                self.slots[i] = None
                yield slot.request


def small_model() -> transformers.PreTrainedModel:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def small_requests(count: int = 7) -> list[Request]:
    """Return prompts of 1 to 30 tokens that come one after the other, and ask for 5 to 20."""
    generator = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [Request([number(0, 128) for _ in range(number(1, 31))], number(5, 21), 3 * i) for i in range(count)]


def small_case() -> list[bool]:
    """Return of each request whether its tokens are those that the model alone makes of it."""
    model = small_model()
    alone = copy.deepcopy(model)
    example = torch.zeros(SLOTS, CHUNK, dtype=torch.long)
    ranks = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    heads = {"*:scaled_dot_product_attention*": {"tensor": "h"}}  # such a small model would be cut nowhere
    spread = autopar.parallelize(
        model, ranks, example, mode="inference", cache_length=LENGTH, constraints=heads
    )  # fmt: skip
    batcher = Batcher(spread)
    same = []
    for request in batcher.serve(small_requests()):
        wanted = alone.generate(torch.tensor([request.prompt]), max_new_tokens=request.most, do_sample=False)
        same.append(request.made == wanted[0, len(request.prompt) :].tolist())
        if not dist.get_rank():
            print(f"step {batcher.steps}: {len(request.prompt)} tokens of prompt, {len(request.made)} made")
    return same


def main() -> None:
    """Serve on two ranks, or on those that torchrun started."""
    found = [small_case()] if dist.is_torchelastic_launched() else run_local(small_case, 2)
    assert all(all(same) for same in found), found
    print(f"{len(found[0])} requests in {SLOTS} slots: the tokens of each of them alone")


if __name__ == "__main__":
    main()
