"""Repeated blocks are traced twice: the graph is the one that tracing everything gives, whatever the blocks do."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO

from autopar.capture import capture
from autopar.capture.graph.building import GraphBuilder
from autopar.capture.recorded import build
from autopar.capture.repeats import repeated
from autopar.capture.trace.decisions import Answers, TraceDecisions, settled
from autopar.capture.trace.tracing import export
from autopar.errors import RunError

D = 8


def counted(model, args, kwargs=None, **more):
    """The captured model, and how many calls were not traced."""
    made = []
    begin = repeated.Repeats.__init__

    def init(self, model, record):
        begin(self, model, record)
        made.append(self)

    with mock.patch.object(repeated.Repeats, "__init__", init):
        captured = capture(model, args, kwargs, **more)
    doubted = any(r.doubt for r in made)
    return captured, 0 if doubted else sum(len(r.skipped) for r in made)


def whole(model, args, kwargs=None, **more):
    """The captured model, every operator of it traced."""
    with mock.patch.object(repeated.Repeats, "_find", lambda self, model: None):
        return capture(model, args, kwargs, **more)


def same(a, b):
    for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True):
        assert x == y, f"\n{x}\n{y}"
    assert a.graph == b.graph and a.graph.fingerprint == b.graph.fingerprint
    assert a.inputs == b.inputs and a.out_spec == b.out_spec and a.constants.keys() == b.constants.keys()


def check(make, skipped, *args, **kwargs):
    """Two fresh models, since one that counts its calls is another the second time; without guards, which refuse it."""
    args = args or (torch.randn(2, 4, D),)
    found = []
    made = []
    begin = repeated.Repeats.__init__

    def init(self, model, record):
        begin(self, model, record)
        made.append(self)

    for all_of_it in (False, True):
        torch.manual_seed(0)
        model = make()
        with mock.patch.object(repeated.Repeats, "__init__", init), contextlib.ExitStack() as stack:
            if all_of_it:
                stack.enter_context(mock.patch.object(repeated.Repeats, "_find", lambda self, model: None))
            traced = partial(export, model, args, kwargs)
            found.append(build(GraphBuilder(model, settled(traced, TraceDecisions(), Answers)[1], ""))[1])
    for x, y in zip(found[0][0].nodes, found[1][0].nodes, strict=True):
        assert repr(x) == repr(y)
    assert repr(found[0]) == repr(found[1])
    assert len(made) == 2 and not made[1].skipped
    assert skipped == (0 if made[0].doubt else len(made[0].skipped))


# -- models of libraries

DEEP = ("gpt2", "llama", "mistral", "opt", "bert", "t5", "whisper", "vit", "mlp_mixer", "transformer_encoder")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_graph_of_a_deep_model_is_the_same(name):
    case = ZOO[name](layers=6)
    captured, skipped = counted(case.model, *case.batch)
    assert skipped == 4
    same(captured, whole(case.model, *case.batch))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 7])
@pytest.mark.parametrize("name", DEEP)
def test_the_graph_of_every_deep_model_of_the_zoo_is_the_same(name, layers):
    case = ZOO[name](layers=layers)
    captured, skipped = counted(case.model, *case.batch)
    assert skipped >= layers - 2 - (name == "t5")
    same(captured, whole(case.model, *case.batch))


def test_a_loss_function_outside_the_model():
    model = Stack(Plain)
    x = torch.randn(2, 4, D)
    captured, skipped = counted(model, (x,), loss_fn=F.mse_loss, targets=(x,))
    assert skipped == N - 2
    same(captured, whole(model, (x,), loss_fn=F.mse_loss, targets=(x,)))


# -- blocks of one's own

N = 6


class Plain(nn.Module):
    """What the others are made from: two layers and a residual."""

    def __init__(self, i=0):
        super().__init__()
        self.i, self.up, self.down, self.norm = i, nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.LayerNorm(D)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block, n=N):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(block(i) for i in range(n))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_blocks_that_are_alike_are_traced_twice():
    check(lambda: Stack(Plain), N - 2)


@pytest.mark.slow
def test_sequential():
    check(lambda: nn.Sequential(nn.Linear(D, D), *[Plain(i) for i in range(N)]), N - 2)


class Numbered(Plain):
    def forward(self, x):
        return super().forward(x) * (self.i + 1)


class Looked(Plain):
    def forward(self, x):
        return super().forward(x) * (vars(self)["i"] + 1)


class Constant(Plain):
    def forward(self, x):
        return super().forward(x) * torch.tensor([1.0 + self.up.in_features])


def alternating(i):
    block = Numbered(i)
    block.i = i % 2
    return block


@pytest.mark.parametrize(("block", "skipped"), [(Numbered, 0), (Looked, 0), (Constant, 0), (alternating, N - 4)])
def test_a_block_that_reads_its_number(block, skipped):
    check(lambda: Stack(block), skipped)


class Counting(Plain):
    def __init__(self, i=0):
        super().__init__(i)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


SEEN: list = []
STATE = SimpleNamespace(n=0, last=None)


class Global(Plain):
    def forward(self, x):
        y = super().forward(x)
        SEEN.append(y)
        return y


class OfModule(Plain):
    def forward(self, x):
        STATE.n += 1
        return super().forward(x) * STATE.n


class OfClass(Plain):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) * OfClass.calls


@pytest.mark.parametrize("block", [Counting, Global, OfModule, OfClass])
def test_a_block_that_writes_to_python_state(block):
    def make():
        SEEN.clear()
        STATE.n = OfClass.calls = 0
        return Stack(block)

    check(make, 0)


class Losses(Stack):
    """A list that the blocks share: the loss is made of what they put there."""

    def __init__(self, deep):
        super().__init__(Plain)
        self.losses = []
        for block in self.blocks:
            block.record = self.losses if not deep else SimpleNamespace(inner={"losses": self.losses})
            block.__class__ = Recording

    def forward(self, x):
        self.losses.clear()
        return super().forward(x) + sum(self.losses)


class Recording(Plain):
    def forward(self, x):
        y = super().forward(x)
        (self.record if isinstance(self.record, list) else self.record.inner["losses"]).append(y.mean())
        return y


@pytest.mark.parametrize("deep", [False, True])
def test_losses_that_blocks_put_into_a_list(deep):
    check(lambda: Losses(deep), 0)


def test_a_function_with_a_list_of_its_own():
    def make():
        held: list = []

        class Closing(Plain):
            def forward(self, x):
                y = super().forward(x)
                held.append(y)
                return y

        class Ending(Stack):
            def forward(self, x):
                held.clear()
                return super().forward(x) + sum(h.sum() for h in held)

        return Ending(Closing)

    check(make, 0)


def test_the_loop_tells_each_block_what_to_do():
    class Telling(Stack):
        def forward(self, x):
            x = self.first(x)
            for i, block in enumerate(self.blocks):
                block.i = i % 3
                x = block(x)
            return x.sum()

    check(lambda: Telling(Numbered), 0)

    class Shared(Stack):
        def __init__(self):
            super().__init__(Plain)
            self.context = SimpleNamespace(factor=1.0)
            for block in self.blocks:
                block.context = self.context
                block.__class__ = Asking

        def forward(self, x):
            x = self.first(x)
            for i, block in enumerate(self.blocks):
                self.context.factor = float(i)
                x = block(x)
            return x.sum()

    class Asking(Plain):
        def forward(self, x):
            return super().forward(x) * self.context.factor

    check(Shared, 0)


# -- tensors


class Inplace(Plain):
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu_())


class Overwriting(Plain):
    def forward(self, x):
        x += self.down(torch.relu(self.up(self.norm(x))))
        return x


class Batch(Plain):
    def __init__(self, i=0):
        super().__init__(i)
        self.norm = nn.BatchNorm1d(4)


class Dropping(Plain):
    def forward(self, x):
        return x + F.dropout(super().forward(x), 0.5)


class Detached(Plain):
    def forward(self, x):
        return x + super().forward(x).detach() + self.up(x).sum()


class Silent(Plain):
    def forward(self, x):
        with torch.no_grad():
            scale = self.norm(x).abs().mean()
        return super().forward(x) * scale


class Held(Plain):
    def __init__(self, i=0):
        super().__init__(i)
        self.mask = torch.full((D,), float(i))

    def forward(self, x):
        return super().forward(x) * self.mask


class Viewing(Plain):
    def forward(self, x):
        return super().forward(x).reshape(4, 2, D).permute(1, 0, 2)


BLOCKS = [
    (Inplace, N - 2), (Overwriting, 0), (Batch, 0), (Dropping, N - 2), (Detached, N - 2), (Silent, 0), (Held, 0),
    (Viewing, N - 3),
]  # fmt: skip


@pytest.mark.parametrize(("block", "skipped"), BLOCKS)
def test_blocks_of_many_kinds(block, skipped):
    check(lambda: Stack(block), skipped)


class Several(Plain):
    """Takes and gives more than one tensor."""

    def forward(self, x, mask=None, *, extra=(), flag=False):
        y = super().forward(x)
        y = y if mask is None else y * mask
        return {"y": y, "mask": mask, "flag": flag, "pair": (y, extra[0] * 2)}


class Passing(Stack):
    def forward(self, x, mask):
        extra, total = (x,), 0
        for block in self.blocks:
            out = block(x, mask, extra=extra, flag=True)
            x, mask, extra = out["y"], out["mask"], (out["pair"][1],)
            assert out["pair"][0] is x and out["flag"] is True
            total = total + extra[0].mean()
        return x.sum() + total


def test_several_tensors_in_and_out():
    check(lambda: Passing(Several), N - 3, torch.randn(2, 4, D), torch.ones(2, 4, 1))


def test_the_number_of_a_block_in_its_arguments():
    class Passing(Stack):
        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x, i // 4)
            return x.sum()

    class Taking(Plain):
        def forward(self, x, i):
            return super().forward(x) * (i + 1)

    check(lambda: Passing(Taking), N - 4 - 1)


def test_a_list_that_each_block_extends():
    class Passing(Stack):
        def forward(self, x):
            seen = []
            for block in self.blocks:
                x = block(x, seen)
            return x.sum() + sum(s.sum() for s in seen)

    class Filling(Plain):
        def forward(self, x, seen):
            seen.append(x)
            return super().forward(x)

    check(lambda: Passing(Filling), 0)


def test_hidden_states_that_the_loop_keeps():
    class Keeping(Stack):
        def forward(self, x):
            states = []
            for block in self.blocks:
                x = block(x)
                states.append(x)
            return torch.stack(states).sum(), states

    check(lambda: Keeping(Plain), N - 3)


@pytest.mark.slow
def test_parameters_that_blocks_share():
    def tied():
        model = Stack(Plain)
        for block in model.blocks[1:]:
            block.up.weight = model.blocks[0].up.weight
        model.blocks[3].down.bias = model.blocks[2].down.bias
        return model

    check(tied, N - 2)

    def recurrent():
        model = Stack(Plain, 2)
        model.blocks = nn.ModuleList([*model.blocks, *model.blocks, *model.blocks])
        return model

    check(recurrent, 0)


@pytest.mark.slow
def test_some_blocks_are_frozen():
    def frozen():
        model = Stack(Plain, 9)
        for block in model.blocks[:4]:
            block.requires_grad_(False)
        return model

    check(frozen, 5)


@pytest.mark.slow
def test_blocks_inside_blocks():
    class Outer(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.inner = nn.ModuleList(Plain(j) for j in range(4))
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x):
            for block in self.inner:
                x = block(x)
            return x * self.scale

    check(lambda: Stack(Outer), N - 2)
    check(lambda: Stack(Outer, 2), 6)


def test_hooks_are_run():
    def hooked():
        model = Stack(Plain)
        model.blocks[4].register_forward_hook(lambda module, args, out: out * 2)
        return model

    check(hooked, N - 3)


def test_a_method_of_one_instance():
    def patched():
        model = Stack(Plain)
        block = model.blocks[3]
        block.forward = lambda x: Plain.forward(block, x) * 3
        return model

    check(patched, N - 3)


def test_no_gradients_through_all_blocks():
    class Frozen(Stack):
        def forward(self, x):
            with torch.no_grad():
                for block in self.blocks:
                    x = block(x)
            return self.first(x).sum()

    check(lambda: Frozen(Plain), N - 2)


@pytest.mark.slow
def test_branches_of_other_shapes():
    class Pyramid(Stack):
        def forward(self, x):
            x = self.first(x)
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i == 2:
                    x = x[:, :2].clone()
            return x.sum()

    check(lambda: Pyramid(Plain), 2)


@pytest.mark.slow
def test_inputs_with_the_names_of_operators():
    class Named(Stack):
        def forward(self, linear, linear_7):
            return super().forward(linear + linear_7)

    x = torch.randn(2, 4, D)
    check(lambda: Named(Plain), N - 2, x, x + 1)


def test_a_tensor_that_leaves_by_a_side_door():
    class Door(Plain):
        def forward(self, x):
            y = self.up(self.norm(x))
            DOOR.put(y)
            return x + self.down(torch.relu(y))

    class Hidden:
        """Nothing in it can be seen."""

        __slots__ = ("inner",)

        def put(self, y):
            self.inner = y

    class Using(Stack):
        def forward(self, x):
            return super().forward(x) + DOOR.inner.sum()

    DOOR = Hidden()
    check(lambda: Using(Door), 0)


def test_a_tensor_that_leaves_where_nobody_looks(monkeypatch):
    class Leaking(Plain):
        def forward(self, x):
            y = self.up(self.norm(x))
            torch.leaked = y  # the state of libraries is not looked at: its use shows what happened
            return x + self.down(torch.relu(y))

    class Using(Stack):
        def forward(self, x):
            return super().forward(x) + torch.leaked.sum()

    monkeypatch.setattr(torch, "leaked", None, raising=False)
    check(lambda: Using(Leaking), 0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Reversing(Plain):
    def forward(self, x):
        return Reversed.apply(super().forward(x))


class Hooking(Plain):
    def forward(self, x):
        y = self.up(self.norm(x))
        y.register_hook(lambda grad: grad * 2)
        return x + self.down(torch.relu(y))


@pytest.mark.parametrize("block", [Reversing, Hooking])
def test_blocks_with_gradients_of_their_own(block):
    check(lambda: Stack(block), 0)


def test_hooks_on_what_blocks_give():
    class Hooked(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x.register_hook(print)
            return x.sum()

    check(lambda: Hooked(Plain), N - 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_blocks(reentrant):
    class Saving(Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.sum()

    check(lambda: Saving(Plain), N - 2)


def test_what_a_block_reads_is_guarded_in_all_of_them():
    class Scaled(Plain):
        def __init__(self, i=0):
            super().__init__(i)
            self.scale = 2.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Stack(Scaled)
    captured, skipped = counted(model, (torch.randn(2, 4, D),))
    assert skipped == N - 2
    captured.guards.check()
    model.blocks[4].scale = 3.0
    with pytest.raises(RunError, match=r"'blocks.4.scale' is 3.0, and was 2.0"):
        captured.guards.check()
