"""What changes gradients: detaching, regions without them, own functions, hooks, checkpoints, scaled tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from habits.base import ROWS, WIDTH, Habit, Tokens, habit


class _Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


@habit
class GradientReversal(Habit):
    """Domain-adversarial training: the gradient changes its sign."""

    def body(self, x: Tensor) -> Tensor:
        return self.b(_Reverse.apply(self.a(x), 0.5))


class _Sign(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


@habit
class BinarySign(Habit):
    """A binary network: sign forward, clipped identity backward."""

    def body(self, x: Tensor) -> Tensor:
        return F.linear(_Sign.apply(self.a(x)), _Sign.apply(self.b.weight))


class _Swish(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * 3 * (s * (1 + x * (1 - s)))


@habit
class SeparateSetupContext(Habit):
    """A function in the newer style; its gradient is three times the true one, so that it shows."""

    def body(self, x: Tensor) -> Tensor:
        return self.b(_Swish.apply(self.a(x)))


class _TwoOutputs(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return one * y + two * 2, one * x + two


@habit
class FunctionOfTwo(Habit):
    """Two inputs, two outputs; the second gradient is doubled."""

    def body(self, x: Tensor) -> Tensor:
        p, q = _TwoOutputs.apply(self.a(x), self.b(x))
        return p - q


class _NoGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        value, index = x.max(1, keepdim=True)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return value, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(1, index, grad * 2)


@habit
class NonDifferentiableOutput(Habit):
    def body(self, x: Tensor) -> Tensor:
        value, index = _NoGrad.apply(self.a(x))
        return self.b(x) * value + index


class _InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5


@habit
class DirtyFunction(Habit):
    """A function that writes to its input and says so; the whole gradient is another."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) + 0.0
        _InPlace.apply(h)
        return self.b(h)


class _Sparsemax(Function):
    """TabNet's and entmax's: it writes to its argument, and does not say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.max(-1, keepdim=True)[0]
        sums = x.sort(-1, descending=True)[0].cumsum(-1) - 1
        ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        support = (ranks * x.sort(-1, descending=True)[0] > sums).sum(-1, keepdim=True)
        y = (x - sums.gather(-1, support - 1) / support).clamp(min=0)
        ctx.save_for_backward(support, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        support, y = ctx.saved_tensors
        grad = grad * (y > 0)
        return (grad - grad.sum(-1, keepdim=True) / support) * (y > 0)


@habit
class SilentlyWrittenArgument(Habit):
    def body(self, x: Tensor) -> Tensor:
        return self.b(x) * _Sparsemax.apply(self.a(x) * 3)


@habit
class SilentlyWrittenAndRead(Habit):
    """What stands there afterwards has the new values, and its gradient as if nothing had been written."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) * 3
        y = _Sparsemax.apply(h)
        return self.b(h) * y + h


@habit
class SilentlyWrittenThroughAView(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x) * 3
        y = _Sparsemax.apply(h.view(-1, 2, WIDTH // 2))
        return y.view_as(h) * self.b(x) + h.detach()


@habit
class SilentlyWrittenInput(Habit):
    refused = "writes to its input 'x' in place\n  write a clone"
    learns_inputs = False

    def body(self, x: Tensor) -> Tensor:
        return self.a(_Sparsemax.apply(x))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.bias = b is not None
        out = x @ w.t()
        return out + b if b is not None else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x, grad.sum(0) if ctx.bias else None


@habit
class LinearByHand(Habit):
    """The linear layer of torch's own tutorial, with and without a bias."""

    def body(self, x: Tensor) -> Tensor:
        h = _Linear.apply(x, self.a.weight, self.a.bias)
        return _Linear.apply(torch.relu(h), self.b.weight, None)


class _Clip(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


@habit
class GradientClipper(Habit):
    """A function that returns its input as it is."""

    def body(self, x: Tensor) -> Tensor:
        return self.b(_Clip.apply(self.a(x)))


class _Couple(Function):
    """A reversible block: backward computes its input again from its output."""

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, f: nn.Module, g: nn.Module) -> tuple[Tensor, Tensor]:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.save_for_backward(y1.detach(), y2.detach())
        return y1, y2

    @staticmethod
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> Any:
        y1, y2 = ctx.saved_tensors
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g = ctx.g(y1)
            g.backward(d2)
        with torch.no_grad():
            x2 = y2 - g
            d1 = d1 + y1.grad
        with torch.enable_grad():
            x2 = x2.detach().requires_grad_()
            ctx.f(x2).backward(d1)
        return d1, d2 + x2.grad, None, None


@habit
class ReversibleBlock(Habit):
    """Its parameters are no inputs of the function: they get their gradients inside ``backward``."""

    def body(self, x: Tensor) -> Tensor:
        y1, y2 = _Couple.apply(x, x * 0.5, self.a, self.b)
        return y1 + y2


@habit
class DetachedTarget(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) - h.detach()


@habit
class DetachedInPlace(Habit):
    """``detach_`` cuts a value off its past."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.detach_()
        return self.b(x) * h


@habit
class DetachedAlias(Habit):
    """A write to a detached alias is a write to the value, without a gradient."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.detach().add_(1)
        return h * 2


@habit
class DataWritten(Habit):
    """The same through ``.data``."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.data.mul_(2)
        return h + self.b(x)


@habit
class DataRead(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h / h.data.norm()


@habit
class StraightThrough(Habit):
    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + (h.round() - h).detach())


@habit
class HardGumbel(Habit):
    """A hard one-hot forward, the softmax backward, written out without its noise."""

    def body(self, x: Tensor) -> Tensor:
        soft = self.a(x).softmax(-1)
        index = soft.max(-1, keepdim=True)[1]
        hard = torch.zeros_like(soft).scatter_(-1, index, 1.0)
        return self.b(hard - soft.detach() + soft)


@habit
class ScaledGradient(Habit):
    """wav2vec's and AlphaZero's way to scale a gradient."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * 0.1 + h.detach() * 0.9)


@habit
class NoGradRegion(Habit):
    """Some of a value under ``no_grad``, then more with gradients."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            norm = h.norm(dim=1, keepdim=True)
        return self.b(x) / norm + self.a(x)


@habit
class NoGradDecorator(Habit):
    @torch.no_grad()
    def targets(self, x: Tensor) -> Tensor:
        return self.a(x).softmax(-1)

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) * self.targets(x)


@habit
class EnableGradInside(Habit):
    """Gradients are switched on again inside a region without."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                k = self.b(x)
        return h + k


@habit
class SetGradEnabled(Habit):
    """Switched by a call, not by a block, as ``set_grad_enabled(train_encoder)`` is used."""

    def body(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            h = self.a(x)
        with torch.set_grad_enabled(self.training):
            return self.b(h) + x


@habit
class WriteUnderNoGrad(Habit):
    """A value with gradients is written to in a region without."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            h.mul_(2)
            h[:, 0] = 0
        return h + self.b(x)


@habit
class InferenceMode(Habit):
    def body(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.b(x).abs().mean().clone()
        return self.a(x) + scale


@habit
class RequiresGradInForward(Habit):
    """A leaf made inside: the gradient that it collects is nobody's."""

    def body(self, x: Tensor) -> Tensor:
        noise = torch.ones(ROWS, WIDTH, dtype=x.dtype).requires_grad_()
        return self.a(x) * noise


@habit
class InputRequiresGradInForward(Habit):
    """``x.requires_grad_()`` in forward, for checkpointing."""

    learns_inputs = False

    def body(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.b(torch.tanh(self.a(x)))


@habit
class TensorHook(Habit):
    """A hook that scales the gradient of an activation."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.register_hook(lambda g: g * 0.5)
        return self.b(h)


@habit
class TensorHookIfNeeded(Habit):
    """The usual guard around it."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: -g)
        return self.b(h)


@habit
class RetainGrad(Habit):
    """``retain_grad`` changes no number."""

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.retain_grad()
        return self.b(h)


@habit
class ForwardHook(Habit):
    """A module's hook that changes its output."""

    refused = "hook"

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, out: out * 2)

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@habit
class BackwardHook(Habit):
    refused = "hook"

    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_hook(lambda module, grads, outs: tuple(g * 2 for g in grads))

    def body(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(torch.tanh(self.b(x)))))


@habit
class Checkpointed(Habit):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.b(torch.relu(self.a(h))), x, use_reentrant=False)


@habit
class CheckpointedReentrant(Habit):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.b(torch.relu(self.a(h))), x, use_reentrant=True)


@habit
class CheckpointedSequence(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def body(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


class _OwnCheckpoint(Function):
    """Keeps nothing, and computes again; it is told of the parameters that its function reads."""

    @staticmethod
    def forward(ctx: Any, function: Any, count: int, *given: Tensor) -> Any:
        ctx.function, ctx.inputs, ctx.weights = function, given[:count], given[count:]
        with torch.no_grad():
            return function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            outs = ctx.function(*(x.view_as(x) for x in inputs))
        return None, None, *torch.autograd.grad(outs, [*inputs, *ctx.weights], grads, allow_unused=True)


class _OwnCheckpointThatScales(_OwnCheckpoint):
    """... but it is more than a checkpoint."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(None if g is None else 3 * g for g in _OwnCheckpoint.backward(ctx, *grads))


@habit
class OwnCheckpoint(Habit):
    """Activation checkpointing of a model's own, as diffusion models have it."""

    function: type[Function] = _OwnCheckpoint

    def inside(self, h: Tensor, scale: Tensor) -> Tensor:
        return self.b(torch.tanh(h)) * scale + h

    def body(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.function.apply(self.inside, 2, h, torch.sigmoid(h), *self.b.parameters())


@habit
class OwnCheckpointThatScales(OwnCheckpoint):
    """Its backward gives other gradients, so it stays whole."""

    function = _OwnCheckpointThatScales


@habit
class ComplexStates(Habit):
    """A diagonal state space in complex numbers: Python's among tensors, conjugates, which torch makes lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.frequency = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cdouble))

    def body(self, x: Tensor) -> Tensor:
        poles = -self.decay.exp() + 1j * self.frequency
        states = self.a(x) * (poles.exp() - 1.0) / poles
        return self.b(2 * (states.conj() @ self.out.mH).real + states.flip(-1).conj().imag)


@habit
class GradInsideForward(Habit):
    """Forces as gradients of an energy: ``autograd.grad`` inside forward."""

    def body(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = torch.tanh(self.a(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@habit
class LossWithoutGradient(Habit):
    """A loss that depends on no parameter's gradient is an error, as ``backward`` is in eager mode."""

    learns_inputs = False
    refused = "require.*grad|no gradient"

    def body(self, x: Tensor) -> Tensor:
        return self.a(x).detach()


@habit
class OneBranchWithoutGradient(Habit):
    """Half of the parameters get no gradient."""

    def body(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x).argmax(-1, keepdim=True)


@habit
class ThroughIndexing(Habit):
    """The largest score decides which value is read; its gradient is that of the value."""

    def body(self, x: Tensor) -> Tensor:
        h, k = self.a(x), self.b(x)
        return k.gather(1, h.argsort(1)) * h.max(1, keepdim=True).values


@habit
class GatedLoss(Tokens):
    """A loss by hand over the tokens that are no padding."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten(), reduction="none")
        seen = (labels != -100).flatten()
        return (losses * seen).sum() / seen.sum().clamp(min=1)
