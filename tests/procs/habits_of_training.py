"""What people do around a step, each a function that trains a model: the parallel one, and a copy in eager mode.

Every one of :data:`SAME` is run with both, on two ranks, with parameters in pieces of several kinds; what it returns,
the gradients and the weights must be equal. Those of :data:`REFUSED` say at once what cannot be.
"""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from procs.habits_of_use import COLUMN_ROW, ROWS, ZERO_FIRST, Net, batch, mse, pair, same, same_gradients, same_weights
from procs.in_turn import wrong
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, prune
from torch.optim import swa_utils

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Any, Batch], Any]

SAME: dict[str, Step] = {}
REFUSED: dict[str, tuple[Step, str]] = {}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"constraints": COLUMN_ROW}, ZERO_FIRST,
    {"constraints": ROWS, "params": {"first.weight": "S1", "second.weight": "S0 step"}},
)  # fmt: skip


def habit(fn: Step) -> Step:
    SAME[fn.__name__] = fn
    return fn


def refused(text: str) -> Callable[[Step], Step]:
    def register(fn: Step) -> Step:
        REFUSED[fn.__name__] = fn, text
        return fn

    return register


def every(all_options: bool) -> dict[str, str]:
    """Run all of them, each with one of the layouts in turn or with all; what went wrong in each, by name."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for i, (name, fn) in enumerate(SAME.items()):
        tried = OPTIONS if all_options else (OPTIONS[i % len(OPTIONS)],)
        found[name] = "\n".join(filter(None, (wrong(partial(run, fn, options)) for options in tried)))
    for name, (fn, text) in REFUSED.items():
        module, _ = pair(Net(mse), given := batch(), **ZERO_FIRST)
        found[name] = wrong(partial(fn, module, given), text)
    return found


def run(fn: Step, options: dict[str, Any]) -> None:
    """One habit with both models.

    Raises:
        AssertionError: something is not the same.
    """
    torch.manual_seed(0)
    module, eager = pair(Net(mse), given := batch(), **options)
    given_values: list[list[Any]] = []
    for model in (module, eager):
        torch.manual_seed(1)
        given_values.append(list(fn(model, given) or ()))
    for mine, theirs in zip(*given_values, strict=True):
        same(*(torch.as_tensor(x).detach() for x in (mine, theirs)))
    same_weights(module, eager)
    same_gradients(module, eager)


def sgd(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def trained(model: Any, optimizer: torch.optim.Optimizer, given: Batch, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(*given).backward()
        optimizer.step()


# --- gradients -------------------------------------------------------------------------------------------------------


@habit
def gradients_are_clipped_by_value(model: Any, given: Batch) -> Any:
    for foreach in (None, False):
        model(*given).backward()
        clip_grad_value_(model.parameters(), 0.02, foreach=foreach)
        yield from [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
    for kind in (1, float("inf"), 2.0):
        model(*given).backward()
        yield clip_grad_norm_(model.parameters(), 0.1, norm_type=kind, error_if_nonfinite=True)
        yield clip_grad_norm_([p for p in model.parameters() if p.ndim > 1], 0.05, kind, foreach=False)
        yield clip_grad_norm_(model.first.weight, 0.01)


@habit
def gradients_are_zeroed_and_kept(model: Any, given: Batch) -> Any:
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        yield from [p.grad.abs().sum() for p in model.parameters() if p.grad is not None]
        model(*given).backward()
        (2 * model(*given)).backward()
        optimizer.step()
    for p in model.parameters():
        p.grad.zero_()
    model.zero_grad(set_to_none=False)
    model(*given).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(*given).backward()
    for p in model.parameters():
        p.grad.detach_()
        p.grad /= 3
    optimizer.step()


@habit
def gradients_become_one_vector(model: Any, given: Batch) -> Any:
    """Gradient surgery: two tasks' gradients, flattened, projected and put back."""
    vectors = []
    for scale in (1.0, -0.3):
        model.zero_grad()
        x, y = given
        model(x * scale, y).backward()
        vectors.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    first, second = vectors
    if float(first @ second) < 1e9:
        first = first - (first @ second) / second.norm() ** 2 * second
    at = 0
    for p in model.parameters():
        p.grad = first[at : at + p.numel()].view_as(p)
        at += p.numel()
    sgd(model).step()
    yield parameters_to_vector([p.grad for p in model.parameters()]).norm()


@habit
def sharpness_is_minimized(model: Any, given: Batch) -> Any:
    """SAM: a step uphill, the gradient there, and back."""
    optimizer = sgd(model)
    for _ in range(2):
        model(*given).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            uphill = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, step in zip(model.parameters(), uphill, strict=True):
                p.add_(step)
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        with torch.no_grad():
            for p, step in zip(model.parameters(), uphill, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        yield loss
        yield norm


@habit
def weights_are_remembered_elastically(model: Any, given: Batch) -> Any:
    """EWC: squared gradients of one task weigh how far parameters may go in the next one."""
    model(*given).backward()
    fisher = {n: p.grad.data.clone().pow(2) for n, p in model.named_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        far = sum((fisher[n] * (p - before[n]) ** 2).sum() for n, p in model.named_parameters())
        loss = model(*given) + 100 * far
        loss.backward()
        optimizer.step()
        yield loss


@habit
def backward_in_other_words(model: Any, given: Batch) -> Any:
    model(*given).backward(torch.tensor(0.5))
    torch.autograd.backward([model(*given), 2 * model(*given)])
    loss = model(*given)
    loss.register_hook(lambda grad: 3 * grad)
    loss.retain_grad()
    loss.backward()
    yield loss.grad
    with torch.autograd.detect_anomaly(check_nan=True):
        model(*given).mean().backward()
    with torch.set_grad_enabled(False):
        yield model(*given)
    with torch.enable_grad():
        model(*given).backward()


@habit
def a_step_is_written_by_hand(model: Any, given: Batch) -> Any:
    """As tutorials do."""
    for _ in range(2):
        model(*given).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad.zero_()
        gradients = torch.autograd.grad(model(*given), list(model.parameters()), allow_unused=True)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.data -= 0.1 * gradient
        torch._foreach_add_([p.data for p in model.parameters()], gradients, alpha=-0.1)


@habit
def a_validation_between_forward_and_backward(model: Any, given: Batch) -> Any:
    x, y = given
    loss = model(x, y)
    model.eval()
    with torch.no_grad():
        yield model(x * 2, y)
        yield model(x[:3], y[:3])
    model.train()
    other = model(x[:5], y[:5])
    (loss + 0.5 * other).backward()
    yield loss
    sgd(model).step()


# --- parameters ------------------------------------------------------------------------------------------------------


@habit
def parameters_are_frozen_for_a_while(model: Any, given: Batch) -> Any:
    optimizer = sgd(model, weight_decay=0.1)
    trained(model, optimizer, given)
    model.first.requires_grad_(False)
    trained(model, optimizer, given)
    yield torch.tensor([p.grad is None for p in model.parameters()])
    model.first.requires_grad_(True)
    for p in model.second.parameters():
        p.requires_grad = False
    trained(model, optimizer, given)
    model.requires_grad_(True)
    trained(model, optimizer, given)


@habit
def groups_come_later(model: Any, given: Batch) -> Any:
    """Gradual unfreezing, as in ULMFiT."""
    optimizer = torch.optim.AdamW(model.second.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(sgd(model), 3)
    trained(model, optimizer, given)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.001})
    model.zero_grad()
    for _ in range(2):
        trained(model, optimizer, given, 1)
        scheduler.step()
    yield torch.tensor(scheduler.get_last_lr())


@habit
def several_optimizers(model: Any, given: Batch) -> Any:
    ones = [torch.optim.Adam(model.first.parameters(), 0.01), torch.optim.RMSprop(model.second.parameters(), 0.01)]
    for i in range(4):
        model(*given).backward()
        ones[i % 2].step()
        ones[i % 2].zero_grad()


@habit
def the_best_weights_are_kept(model: Any, given: Batch) -> Any:
    optimizer = sgd(model)
    trained(model, optimizer, given)
    best, kept = copy.deepcopy(model.state_dict()), {n: p.clone() for n, p in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    trained(model, optimizer, given, 3)
    model.load_state_dict(best)
    yield model(*given)
    trained(model, optimizer, given)
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    trained(model, optimizer, given)
    yield model(*given)


@habit
def weights_move_towards_those_of_a_task(model: Any, given: Batch) -> Any:
    """Reptile."""
    for _ in range(2):
        before = copy.deepcopy(model.state_dict())
        trained(model, torch.optim.Adam(model.parameters(), 0.01), given)
        after = model.state_dict()
        model.load_state_dict({n: before[n] + (after[n] - before[n]) * 0.5 for n in before})
        yield model(*given)


@habit
def weights_are_constrained(model: Any, given: Batch) -> Any:
    """Of WGAN, max-norm, unit columns, masks, weight standardization."""
    optimizer = sgd(model)
    mask = (torch.arange(128).reshape(16, 8) % 3 > 0).to(torch.get_default_dtype())
    for _ in range(2):
        trained(model, optimizer, given, 1)
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)
        with torch.no_grad():
            w = model.first.weight
            w *= mask
            w.copy_(w * (w.norm(dim=1, keepdim=True).clamp(max=0.5) / (w.norm(dim=1, keepdim=True) + 1e-9)))
            w.div_(w.norm(dim=0, keepdim=True) + 1e-9)
            model.second.weight.sub_(model.second.weight.mean(dim=1, keepdim=True))
            model.second.weight.div_(model.second.weight.std(dim=0, keepdim=True))
            model.second.bias.copy_(torch.linspace(0, 1, 4))


@habit
def random_numbers_of_parameters(model: Any, given: Batch) -> Any:
    """Initialized anew, noisy gradients, dropped weights: with a seed they are those of one device."""
    for init in (
        nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.kaiming_normal_,
        lambda w: nn.init.trunc_normal_(w, std=0.3), lambda w: w.data.normal_(0, 0.2),
        lambda w: nn.init.sparse_(w, 0.3),
    ):  # fmt: skip
        for layer in (model.first, model.second):
            init(layer.weight)
            nn.init.uniform_(layer.bias, -0.1, 0.1)
        yield model.first.weight.norm()
        yield model(*given)
    model(*given).backward()
    for p in model.parameters():
        p.grad += 0.01 * torch.randn_like(p.grad)
        drawn = torch.rand_like(p)
        assert not isinstance(drawn, DTensor) or drawn.placements == p.placements
        p.grad.add_(drawn, alpha=0.1)
        p.grad *= torch.bernoulli(torch.full_like(p.grad, 0.7))
        p.data.add_(nn.functional.dropout(p.detach(), 0.5), alpha=-0.1)
        p.data[0].add_(torch.poisson(p.detach()[0].abs() * 9))
        p.data.add_(torch.normal(p.detach(), 0.1))
    sgd(model).step()
    yield torch.rand(3)


@habit
def layers_are_initialized_by_apply(model: Any, given: Batch) -> Any:
    """By hand, and by ``apply``, of all and of a part."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            module.bias.data.fill_(0.1)

    for module in model.modules():
        init(module)
    yield from [p.detach().clone() for p in model.parameters()]
    model.apply(init)
    yield from [p.detach().clone() for p in model.parameters()]
    assert model.second.apply(init) is model.second
    trained(model, sgd(model), given)


@habit
def averages_of_every_kind(model: Any, given: Batch) -> Any:
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    mine = swa_utils.AveragedModel(model, avg_fn=lambda average, p, n: 0.5 * average + 0.5 * p)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(3):
        trained(model, optimizer, given, 1)
        schedule.step()
        ema.update_parameters(model)
        mine.update_parameters(model)
    yield ema(*given)
    yield mine(*given)
    yield from [p.detach().norm() for average in (ema, mine) for p in average.parameters()]


@habit
def an_optimizer_is_looked_into(model: Any, given: Batch) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer, given)
    yield from [optimizer.state[p]["exp_avg_sq"].mean() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        for p in group["params"]:
            optimizer.state[p]["exp_avg"].mul_(0.5)
    trained(model, optimizer, given)
    optimizer.state = defaultdict(dict)
    trained(model, optimizer, given)
    yield torch.tensor([float(optimizer.state[p]["step"]) for p in model.parameters()])


@habit
def a_module_around_it(model: Any, given: Batch) -> Any:
    """Lightning's habit: the model is a part of another module."""

    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.scale = model, nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.scale * self.model(x, y)

    lit = Lit()
    optimizer = sgd(lit)
    trained(lit, optimizer, given)
    lit.eval()
    lit.train()
    yield clip_grad_norm_(lit.parameters(), 0.1)
    state = copy.deepcopy(lit.state_dict())
    trained(lit, optimizer, given)
    lit.load_state_dict(state)
    yield lit(*given)
    yield torch.tensor(sum(p.numel() for p in lit.parameters()))


@habit
def parameters_are_looked_at(model: Any, given: Batch) -> Any:
    """Logs of histograms, counts and sizes."""
    model(*given).backward()
    for p in model.parameters():
        for x in (p, p.grad):
            yield from (torch.histc(x.detach(), 5, -1, 1), x.std(), x.median(), (x == 0).sum(), x.abs().mean(), x.max())
        yield (0.1 * p.grad).std() / p.data.std()
        yield torch.quantile(p, 0.3)
        for dim in range(-p.ndim, p.ndim):
            quantiles = torch.quantile(p, torch.tensor([0.2, 0.7]), dim=dim)
            yield quantiles
            yield torch.autograd.grad(quantiles.square().sum(), p)[0]
            yield torch.nanquantile(p, 0.5, dim=dim, keepdim=True)
        yield torch.nn.functional.mse_loss(p, torch.ones(p.shape))
    yield torch.tensor([p.numel() for p in model.parameters() if p.requires_grad])
    yield torch.tensor([len(repr(model)) > 0, next(model.parameters()).device.type == "cpu"])
    yield model.get_parameter("first.weight").sum()
    yield model.get_submodule("second").bias.sum()
    yield torch.as_tensor(dict(model.named_parameters())["second.bias"].shape)


@habit
def called_with_other_parameters(model: Any, given: Batch) -> Any:
    """``functional_call``, for a while; then with the model's own."""
    others = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, given)
    loss.backward()
    yield loss
    yield from [other.grad for other in others.values()]
    yield torch.tensor([p.grad is None for p in model.parameters()])
    loss = torch.func.functional_call(model, {"first.weight": others["first.weight"].detach()}, given)
    loss.backward()
    yield loss
    trained(model, sgd(model), given)


# --- what is refused -------------------------------------------------------------------------------------------------


@refused("RunError|CaptureError|AutoparError")
def wrapped_by_ddp(model: Any, given: Batch) -> Any:
    nn.parallel.DistributedDataParallel(model)


@refused("RunError: a parallel module was called within torch.func .*copy of the model")
def gradients_by_functional_calls(model: Any, given: Batch) -> Any:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, given))(parameters)


@refused("RunError: a parallel module was called within torch.func .*copy of the model")
def gradients_of_each_row(model: Any, given: Batch) -> Any:
    torch.func.vmap(lambda x, y: model(x[None], y[None]))(*given)


@refused("RunError: torch.jit.trace of a parallel module: .*trace a copy of the model")
def traced(model: Any, given: Batch) -> Any:
    torch.jit.trace(model, given)


@refused("RunError: torch.jit.script of a parallel module: .*script a copy of the model")
def scripted(model: Any, given: Batch) -> Any:
    torch.jit.script(model)


@refused("RunError: torch.export of a parallel module: .*give it a copy of the model")
def exported(model: Any, given: Batch) -> Any:
    torch.export.export(model, given)


@refused("RunError: torch.fx.symbolic_trace of a parallel module: .*give it a copy of the model")
def traced_by_fx(model: Any, given: Batch) -> Any:
    torch.fx.symbolic_trace(model)


@refused("RunError: qconfig of .* was set, with which torch.ao.quantization begins")
def quantized_afterwards(model: Any, given: Batch) -> Any:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


@refused("RunError: weight_orig of 'first' was registered on a parallel module: .*would go on")
def pruned_afterwards(model: Any, given: Batch) -> Any:
    prune.l1_unstructured(model.first, "weight", 0.3)


@refused("RunError|CaptureError|AutoparError")
def weights_normed_afterwards(model: Any, given: Batch) -> Any:
    nn.utils.parametrizations.weight_norm(model.first)
    model(*given)


@refused("RunError")
def saved_whole(model: Any, given: Batch) -> Any:
    torch.save({"model": model}, io.BytesIO())
