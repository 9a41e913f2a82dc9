"""Gradients that a model's own code makes: every module here trains as in eager mode, or is refused with its place.

Each module is compared with eager mode over three batches on one device, and over one on two ranks in this process,
under a plan that cuts every contraction and a random one: loss, gradients and buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from procs.in_turn import marked
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import autopar.rules  # noqa: F401
from autopar.capture import Captured, capture
from autopar.certificate import check
from autopar.comparison import program_vs_eager as V
from autopar.comparison.in_process_ranks import run_step
from autopar.errors import CaptureError, RuleError
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.random_plans import random_plan
from autopar.planner.plan_notes import notes_on
from autopar.rules.function import function_rule
from autopar.rules.registry import rules_of
from autopar.words.meshes import Mesh
from hardware_profiles import abstract_cluster, load_cluster

MESH = Mesh.of(data=2)
CLUSTER = abstract_cluster(dict(MESH), alpha=(1e-6,), beta=(1e-9,))
MODULES: dict[str, Callable[[], nn.Module]] = {}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {}


def works(make: Any) -> Any:
    """A module that must train as in eager mode; its forward takes x [4 8] and gives the loss."""
    MODULES[make.__name__] = make
    return make


def refused(text: str) -> Any:
    """A module that must be refused with an error that says so."""

    def register(make: Any) -> Any:
        REFUSED[make.__name__] = make, text
        return make

    return register


class Net(nn.Module):
    """Two linears with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.tanh(self.a(x)))).pow(2).mean()


# --- Functions of all styles -----------------------------------------------------------------------------------------


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


reverse = Reverse.apply


@works
class Reversal(Net):
    def between(self, h: Tensor) -> Tensor:
        return reverse(h, 0.5)


@works
class ReversalOfAView(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + Reverse.apply(h.view(-1)).view_as(h).relu()


class Clip(Function):
    """Its backward is no linear function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.003, 0.003)


@works
class ClippedGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        return Clip.apply(h)


class Normalized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-6)


@works
class NormalizedGradientOfAWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(F.linear(x, Normalized.apply(self.a.weight), self.a.bias))).pow(2).mean()


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


@works
class MemoryEfficientSwish(Net):
    def between(self, h: Tensor) -> Tensor:
        return Swish.apply(h) + Swish.apply(2 * h)


class Scaled(Function):
    """The style with ``setup_context``, two tensors, a keyword, and a gradient that is not the true one."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, power: int = 2, mode: str = "mul") -> Tensor:
        return x * w**power if mode == "mul" else x + w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.power, ctx.mode = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0) * 3, None, None


@works
class SetupContext(Net):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def between(self, h: Tensor) -> Tensor:
        return Scaled.apply(h, self.w, power=3) + Scaled.apply(h, self.w)


class TopOfTwo(Function):
    """Several outputs, one of them not differentiable, one no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        where = x > y
        top = torch.where(where, x, y)
        score = (x - y).abs()
        ctx.save_for_backward(where)
        ctx.mark_non_differentiable(score)
        return top, score, "note", (x + y)

    @staticmethod
    def backward(ctx: Any, top: Tensor, score: Any, note: Any, both: Tensor) -> Any:
        (where,) = ctx.saved_tensors
        return 2 * top * where + both, both - top * ~where


@works
class SeveralOutputs(Net):
    def between(self, h: Tensor) -> Tensor:
        top, score, note, both = TopOfTwo.apply(h, h.roll(1, 1) * 0.5)
        assert note == "note"
        assert not score.requires_grad
        return top + 0.1 * score * h + both.sin()


@works
class OneOfSeveralOutputs(Net):
    def between(self, h: Tensor) -> Tensor:
        return TopOfTwo.apply(h, h.flip(0))[0]


class NoGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.5, None


@works
class NoneAsGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        return NoGradient.apply(h, self.c(h.detach()))


class NotMaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        assert b is None, "nobody reads the second"
        return a * 5


@works
class GradientsNotMaterialized(Net):
    def between(self, h: Tensor) -> Tensor:
        return NotMaterialized.apply(h)[0]


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(slope)
        ctx.slope = slope
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.slope * 2, None


@works
class MarkedDirty(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h * 1.5
        y = InPlace.apply(h, 0.3)
        return h + y.sin()


class Track(Function):
    """Writes to a buffer that is an argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.save_for_backward(mean.clone())
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad + ctx.saved_tensors[0], None


@works
class BufferWrittenInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0, 0.1, 8))

    def between(self, h: Tensor) -> Tensor:
        return Track.apply(h, self.mean)


class ByNumpy(Function):
    """Leaves torch, so it cannot run on tensors without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(np.cos(x.detach().numpy())) * grad * 2


class Config:
    gain = 0.7


class WithObjects(Function):
    """Arguments that are no tensors and no numbers, and tensors in a list, which autograd does not see."""

    @staticmethod
    def forward(ctx: Any, fn: Any, config: Any, x: Tensor, others: list[Tensor]) -> Tensor:
        ctx.config = config
        return fn(x) * config.gain + others[0] + others[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, grad * ctx.config.gain, None


@works
class ObjectsAndLists(Net):
    def between(self, h: Tensor) -> Tensor:
        return WithObjects.apply(torch.sin, Config(), h, [h * 2, torch.ones(8, dtype=h.dtype)])


def made(slope: float) -> type[Function]:
    class Leaky(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.where(x > 0, x, x * slope)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return torch.where(x > 0, grad, grad * slope * 10)

    return Leaky


@works
class ClosuresOfOneClass(Net):
    def between(self, h: Tensor) -> Tensor:
        return made(0.1).apply(h) + made(0.2).apply(h)


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = Reverse.apply(inner.sin(), 2.0)
        ctx.save_for_backward(inner, out)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inner, out = ctx.saved_tensors
        return torch.autograd.grad(out, inner, grad, retain_graph=True)


@works
class FunctionInAFunction(Net):
    def between(self, h: Tensor) -> Tensor:
        return Nested.apply(h)


@works
class FunctionWithoutGradients(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            mask = Swish.apply(h)
        return h * mask + Swish.apply(h.detach())


@works
class FunctionInALoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return Clip.apply(self.b(self.a(x)).pow(2).mean())


class Split(Function):
    """Reversible: makes its inputs again from its outputs, and calls ``backward()`` on parts of the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        ctx.f, ctx.g = f, g
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            c = a + f(b)
            d = b + g(c)
        out = torch.cat([c, d], -1)
        ctx.save_for_backward(out.detach())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        c, d = out.chunk(2, -1)
        dc, dd = grad.chunk(2, -1)
        with torch.enable_grad():
            c = c.detach().requires_grad_()
            g = ctx.g(c)
            g.backward(dd)
        b = d - g.detach()
        dc = dc + c.grad
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            f = ctx.f(b)
            f.backward(dc)
        return torch.cat([dc, dd + b.grad], -1), None, None


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(self.norm(x)))


@works
class Reversible(Net):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.ModuleList(Half() for _ in range(2)), nn.ModuleList(Half() for _ in range(2))

    def between(self, h: Tensor) -> Tensor:
        for f, g in zip(self.f, self.g, strict=True):
            h = Split.apply(h, f, g)
        return h


@works
class ParameterReadInsideAndElsewhere(Net):
    """A Function that takes a weight from where it stands, not as an argument."""

    def between(self, h: Tensor) -> Tensor:
        model = self

        class Tied(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x @ model.a.weight

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad @ model.a.weight.mT

        return Tied.apply(h)


@torch.library.custom_op("autopar_test::clipped", mutates_args=())
def clipped(x: Tensor, limit: float) -> Tensor:
    return x.clone()


@clipped.register_fake
def _(x: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


def _keep_limit(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.limit = inputs[1]


clipped.register_autograd(lambda ctx, g: (g.clamp(-ctx.limit, ctx.limit), None), setup_context=_keep_limit)


@works
class CustomOperator(Net):
    def between(self, h: Tensor) -> Tensor:
        return clipped(h, 0.002)


# --- hooks -----------------------------------------------------------------------------------------------------------


@works
class Hook(Net):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: g.clamp(-0.003, 0.003))
        return h


@works
class HookAfterItsReader(Net):
    def between(self, h: Tensor) -> Tensor:
        y = h.sin()
        h.register_hook(lambda g: g / (g.norm() + 0.1))
        return y + h.cos()


@works
class TwoHooks(Net):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda g: g + 1e-3)
        z = h * 2
        h.register_hook(lambda g: g * 3)
        return z + h


@works
class HookOnACopy(Net):
    def between(self, h: Tensor) -> Tensor:
        z = h.clone()
        z.register_hook(torch.neg)
        return h * 0.5 + z


@works
class HookOnAView(Net):
    def between(self, h: Tensor) -> Tensor:
        v = h.view(-1)
        v.register_hook(lambda g: g.sign() * 1e-3)
        return h + v.view(4, 8) * 0.5


@works
class HookBeforeAWrite(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h * 1.0
        h.register_hook(lambda g: g * 7)
        h.add_(1)
        return h * h


@works
class HookThatWatches(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def watch(self, name: str, grad: Tensor) -> None:
        self.seen[name] = 1.0

    def between(self, h: Tensor) -> Tensor:
        import functools

        h.register_hook(functools.partial(self.watch, "h"))
        return h


# --- flow ------------------------------------------------------------------------------------------------------------


@works
class StraightThrough(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).detach()


@works
class GradientScaled(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * 0.1 + (h - h * 0.1).detach()


@works
class StopGradientBranch(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * self.a(h).detach() + h.data * 2


@works
class DetachedInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        z = self.a(h)
        z.detach_()
        return h + z * 3


@works
class NoGradReturnsItsInput(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            same = h
            scale = 1 / h.norm()
        return same * scale


@works
class EnabledInsideNoGrad(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            k = h * 2
            with torch.enable_grad():
                y = self.a(h) + k
            z = y * 3
        return y + z


@works
class SwitchedOffAndOn(Net):
    def between(self, h: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        k = self.a(h)
        torch.set_grad_enabled(True)
        return h + k


class Quiet(nn.Linear):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@works
class DecoratedModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.quiet = Quiet(8, 8)

    def between(self, h: Tensor) -> Tensor:
        return h * self.quiet(h)


@works
class Teacher(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return F.cross_entropy(self.b(torch.tanh(self.a(x))), target)


@works
class FrozenPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


@works
class LeafInTheMiddle(Net):
    def between(self, h: Tensor) -> Tensor:
        leaf = h.detach().requires_grad_()
        return h * leaf.sin()


@works
class VectorQuantized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8).sin())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        q = self.codes[torch.cdist(h.detach(), self.codes.detach()).argmin(-1)]
        commit = (q.detach() - h).pow(2).mean() + 0.25 * (q - h.detach()).pow(2).mean()
        return self.b(h + (q - h).detach()).pow(2).mean() + commit


@works
class Inference(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.a(h).norm().clone()
        return h + scale


@works
class KeptGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        h.retain_grad()
        return h


# --- what is refused -------------------------------------------------------------------------------------------------


@refused(r"autograd.Function ClosesOver.between.<locals>.Masked: it uses a tensor of shape \[4 8\] that was made in")
class ClosesOver(Net):
    def between(self, h: Tensor) -> Tensor:
        mask = h.detach().abs()

        class Masked(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * mask

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * mask

        return Masked.apply(h)


@refused("Count: it changes a tensor that is not among its arguments")
class ChangesABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def between(self, h: Tensor) -> Tensor:
        model = self

        class Count(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                model.count.add_(1)
                return x * model.count

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad

        return Count.apply(h)


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + torch.randn_like(grad)


@refused("Noisy: its backward draws random numbers")
class DrawsInBackward(Net):
    def between(self, h: Tensor) -> Tensor:
        return Noisy.apply(h)


class Listed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 1.0, [x * 2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, rest: Any) -> Tensor:
        return grad


@refused("Listed: it returns tensors inside a container")
class ReturnsAList(Net):
    def between(self, h: Tensor) -> Tensor:
        return Listed.apply(h)[0]


class Picky(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.sum().item() != 0, "all zero"
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@refused("Picky: its forward cannot run on tensors without values .* nor on zeros .AssertionError: all zero")
class NeedsValues(Net):
    def between(self, h: Tensor) -> Tensor:
        return Picky.apply(h)


@refused(r"the hook HookOverATensor.between.<locals>.<lambda>: it closes over a tensor of shape \[4 8\] of the forward")
class HookOverATensor(Net):
    def between(self, h: Tensor) -> Tensor:
        mask = h.detach() > 0
        h.register_hook(lambda g: g * mask)
        return h


@refused("a hook on grad_fn inside a forward in '<model>' at test_gradients.py:")
class HookOnThePast(Net):
    def between(self, h: Tensor) -> Tensor:
        assert h.grad_fn is not None
        h.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        return h


@refused("a hook on grad_fn inside a forward")
class HookOnSeveral(Net):
    def between(self, h: Tensor) -> Tensor:
        torch.autograd.graph.register_multi_grad_hook([h, h * 2], lambda grads: None)
        return h


@refused("a hook on a parameter inside a forward")
class HookOnAParameter(Net):
    def between(self, h: Tensor) -> Tensor:
        self.b.weight.register_hook(lambda g: g * 2)
        return h


@refused("cannot capture the backward hooks of a module in 'a' at ")
class ModuleHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_hook(lambda *_: None)


@refused("cannot capture saved_tensors_hooks inside a forward: .* in '<model>' at test_gradients.py:")
class SavedTensors(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.double()):
            return self.a(h)


@works
class GradientByTransform(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda z: self.b(torch.tanh(self.a(z))).sum())(x).pow(2).mean()


@works
class GradientOfEachRow(Net):
    """A force for each row, and the energy beside it."""

    def forward(self, x: Tensor) -> Tensor:
        forces, energy = torch.vmap(torch.func.grad_and_value(lambda row: self.b(torch.tanh(self.a(row))).sum()))(x)
        return forces.pow(2).mean() + energy.mean()


@works
class MappedRows(Net):
    """A function of a row and of places in a mask, mapped over both, as masks of attention are made."""

    def forward(self, x: Tensor) -> Tensor:
        seen = x > 0

        def in_sight(row: Tensor, place: Tensor) -> Tensor:
            return seen.index_select(0, row[None])[0].index_select(0, place[None])[0] & (place > 0)

        mask = torch.vmap(torch.vmap(in_sight, (None, 0)), (0, None))(torch.arange(len(x)), torch.arange(x.shape[1]))
        return torch.vmap(lambda row, there: (self.a(row) * there).sum())(x, mask).pow(2).mean() + self.b(x).mean()


@works
class DirectionalByTransform(Net):
    """A derivative in a direction, and the Hessian's trace of each row."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(z: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(z))).sum()

        (along,) = torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1:]
        return along.pow(2) / len(x) + torch.vmap(torch.func.hessian(energy))(x).diagonal(0, 1, 2).sum(1).mean()


@refused(r"cannot capture torch.autograd.grad inside a forward, through Clip, in '<model>' at test_gradients.py:\d+")
class GradientThroughAFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.b(Clip.apply(self.a(x))).sum(), x, create_graph=True)
        return force.pow(2).mean()


@refused(r"cannot capture backward\(\) inside a forward in '<model>' at test_gradients.py:\d+")
class BackwardInside(Net):
    def between(self, h: Tensor) -> Tensor:
        h.sum().backward(retain_graph=True)
        return h


@refused("cannot capture a write through .data in '' at test_gradients.py:")
class WritesToData(Net):
    def between(self, h: Tensor) -> Tensor:
        h.data[:, 2:].mul_(2)
        return h


@refused(
    r"the loss of LossDetached does not require a gradient.*its gradient ends in '<model>' at test_gradients.py:\d+"
)
class LossDetached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach() * 2


@refused("the loss of LossOfCounts .*: gt .* has no gradient")
class LossOfCounts(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) > 0).double().mean()


@refused("the loss of LossOfConstants .*: it depends on no parameter that requires a gradient")
class LossOfConstants(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


# --- the comparison --------------------------------------------------------------------------------------------------


def batches() -> list[Tensor]:
    return [torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(3)]


def eager(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and new buffers of one step, buffers put back."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.zero_grad()
    loss = model(x)
    loss.backward()
    after = {n: b.clone() for n, b in model.named_buffers()}
    for n, b in model.named_buffers():
        b.data.copy_(before[n])
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, after


def close(what: str, mine: Tensor, theirs: Tensor) -> None:
    assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12), f"{what}: {(mine - theirs).abs().max():.3g} apart"


def compare(model: nn.Module, captured: Captured, n_random: int = 1) -> None:
    """One device and two ranks against eager mode."""
    graph = captured.graph
    weights, buffers = V.state_of(captured, model)
    priced, rules = pricer(CLUSTER, MESH), rules_of(graph)
    plans = [V.one_device(graph), plan_graph(graph, CLUSTER, MESH)]
    plans += [random_plan(graph, rules, priced, seed) for seed in range(n_random)]
    for k, x in enumerate(batches()):
        loss, gradients, changed = eager(model, x)
        for plan in plans if k == 2 else plans[:1]:
            program = V.lower(graph, plan)
            done = run_step(graph, plan, program, weights, buffers, V.inputs_of(captured, (x,), {}))
            close("loss", done.outputs[0], loss)
            assert set(done.gradients) == set(gradients)
            for name, g in gradients.items():
                close(f"gradient of {name}", done.gradients[name], g)
            for name, b in done.buffers.items():
                if name in changed:
                    close(name, b, changed[name])


@pytest.mark.parametrize("name", marked(MODULES, [*MODULES][1::3]))
def test_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name]().double()
    captured = capture(model, (batches()[0],))
    compare(model, captured)
    with V.fake_world(MESH):
        V.typecheck(V.lower(captured.graph, plan_graph(captured.graph, CLUSTER, MESH)))


@pytest.mark.parametrize("name", list(REFUSED))
def test_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text):
        capture(make().double(), (batches()[0],))


def test_a_loss_without_gradient_where_none_is_wanted() -> None:
    x = batches()[0]
    assert capture(LossDetached().double().eval(), (x,)).graph.loss is None
    assert capture(LossDetached().double().requires_grad_(False), (x,)).graph.loss is None
    with pytest.raises(CaptureError, match="the loss of Net with its loss_fn does not require a gradient"):
        capture(Net().double().eval(), (x,), loss_fn=lambda out: out.detach())


def test_what_is_told() -> None:
    with pytest.warns(UserWarning, match=r"retain_grad\(\) in '<model>' at test_gradients.py:\d+ has no effect"):
        capture(KeptGradient().double(), (batches()[0],))


def test_code_that_leaves_torch() -> None:
    """It runs as it is, on zeros where there are no values: one device, since ranks in one process are no arrays."""

    class Numpy(Net):
        def between(self, h: Tensor) -> Tensor:
            return ByNumpy.apply(h)

    model = Numpy().double()
    captured = capture(model, (batches()[0],))
    graph = captured.graph
    weights, _ = V.state_of(captured, model)
    for x in batches():
        loss, gradients, _ = eager(model, x)
        program = V.lower(graph, V.one_device(graph))
        values = {**weights, "x": x}
        flat = program.module(*(values[slot.name] for slot in program.slots))
        names = [n for n in weights if weights[n].requires_grad]
        close("loss", flat[0].detach(), loss)
        for name, g in zip(names, torch.autograd.grad(flat[0], [weights[n] for n in names]), strict=True):
            close(name, g, gradients[name])
    plan = plan_graph(graph, load_cluster("dgx-h100"), MESH)
    assert check(plan, graph, load_cluster("dgx-h100")).ok


class Cubed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


def test_a_rule_in_one_line() -> None:
    """With it a Function is cut like an operator; without, it is kept whole, and the plan says so."""

    class Cubes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0.5, 1.5, 8))

        def between(self, h: Tensor) -> Tensor:
            return Cubed.apply(h, self.w)

    model = Cubes().double()
    captured = capture(model, (batches()[0],))
    plan = plan_graph(captured.graph, CLUSTER, MESH)
    assert plan.ops["function"] == ("I",)
    assert notes_on(captured.graph) == ("no rule for function.Cubed: replicated",)
    function_rule(Cubed, "b k, k -> b k")
    rule = next(r for r in rules_of(captured.graph) if r is not None and r.whole_gradients)
    assert str(rule) == "b k, k -> b k"
    plan = plan_graph(captured.graph, CLUSTER, MESH)
    assert plan.ops["function"] in (("b",), ("k",))
    assert not notes_on(captured.graph)
    compare(model, captured, n_random=4)
    assert check(plan, captured.graph, CLUSTER).ok
    with pytest.raises(RuleError, match=r"is no torch.autograd.Function; pass the class"):
        function_rule(Cubed.apply, "... -> ...")
    with pytest.raises(RuleError, match="is no rule; write it like"):
        function_rule(Cubed, "pointwise")


class Jitter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


def test_random_numbers_are_drawn_alike() -> None:
    """On all ranks and in every plan, others in each step; and no draw outside is changed by it."""

    class Jitters(Net):
        def between(self, h: Tensor) -> Tensor:
            return Jitter.apply(h) + Jitter.apply(h)

    model = Jitters().double()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    captured = capture(model, (batches()[0],))
    assert torch.equal(torch.get_rng_state(), before)
    weights, buffers = V.state_of(captured, model)
    inputs = V.inputs_of(captured, (batches()[0],), {})
    reference = V.train(captured, V.one_device(captured.graph), weights, buffers, inputs)
    assert not torch.equal(reference.losses[0], V.train(
        captured, V.one_device(captured.graph), weights, buffers, inputs, seed=5).losses[0])  # fmt: skip
    for seed in range(2):
        plan = random_plan(captured.graph, rules_of(captured.graph), pricer(CLUSTER, MESH), seed)
        found = V.compare(str(seed), V.train(captured, plan, weights, buffers, inputs), reference)
        assert found.worst < 1e-9, found


def test_functions_are_told_apart() -> None:
    """By their code, by what they close over and by their literals; the same model has the same fingerprint."""

    def graph(fn: Any) -> str:
        class Any_(Net):
            def between(self, h: Tensor) -> Tensor:
                return fn(h)

        torch.manual_seed(0)
        return capture(Any_(), (torch.randn(4, 8),)).graph.fingerprint

    found = [graph(f) for f in (
        made(0.1).apply, made(0.2).apply, Clip.apply, lambda h: Reverse.apply(h, 1.0), lambda h: Reverse.apply(h, 2.0),
    )]  # fmt: skip
    assert len(set(found)) == 5
    assert graph(made(0.1).apply) == found[0]
