"""What people write in training loops, each a function that makes its models by ``made`` and trains them.

Every one of :data:`LOOPS` runs twice on each of two ranks: with parallel modules, whose parameters are in pieces, and
with the models themselves in eager mode. What it gives must be equal, in float64. Those of :data:`REFUSED_LOOPS` say
at once what cannot be.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from procs.cases import TWO, device_mesh, whole
from procs.in_turn import wrong
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import autopar

Made = Callable[..., Any]
Loop = Callable[[Made], Iterator[Any]]

LOOPS: dict[str, Loop] = {}
REFUSED_LOOPS: dict[str, tuple[Loop, str]] = {}
CUTS: tuple[dict[str, Any], ...] = (
    {"constraints": {"*first*": {"data": "n"}, "*second*": {"data": "k"}}},
    {"constraints": {"*:linear*": {"data": "b"}}, "params": {"*.weight": "S0 step"}},
    {"constraints": {"*norm*": {"data": "c"}}},  # torch's own norm, on some channels
)


def loop(fn: Loop) -> Loop:
    LOOPS[fn.__name__] = fn
    return fn


def refused_loop(text: str) -> Callable[[Loop], Loop]:
    def register(fn: Loop) -> Loop:
        REFUSED_LOOPS[fn.__name__] = fn, text
        return fn

    return register


def every_loop(all_cuts: bool) -> dict[str, str]:
    """Run all of them, each with one of the cuts in turn or with all; what went wrong in each, by name."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for i, (name, fn) in enumerate(LOOPS.items()):
        tried = CUTS if all_cuts else (CUTS[i % len(CUTS)],)
        found[name] = "\n".join(filter(None, (wrong(partial(_compared, fn, options)) for options in tried)))
    for name, (fn, text) in REFUSED_LOOPS.items():
        torch.manual_seed(1)
        found[name] = wrong(lambda: list(fn(_maker(CUTS[0]))), text)  # noqa: B023
    return found


def _maker(options: dict[str, Any]) -> Made:
    def made(model: nn.Module, *example: Any, **more: Any) -> Any:
        if not hasattr(model, "norm") and "*norm*" in options["constraints"]:
            return autopar.parallelize(model, device_mesh(TWO), example, **more)
        return autopar.parallelize(model, device_mesh(TWO), example, **{**options, **more})

    return made


def _compared(fn: Loop, options: dict[str, Any]) -> None:
    found: list[list[Any]] = []
    for made in (_maker(options), lambda model, *example, **more: model):
        torch.manual_seed(1)
        found.append(list(fn(made)))
    assert len(found[0]) == len(found[1]) > 0
    for i, (mine, theirs) in enumerate(zip(*found, strict=True)):
        here = (whole(torch.as_tensor(x)).detach() for x in (mine, theirs))
        torch.testing.assert_close(*here, rtol=1e-9, atol=1e-11, msg=lambda text, i=i: f"value {i}: {text}")


class Classifier(nn.Module):
    """Scores [b 4] of features [b 8], with a norm that has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def rows(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 8), torch.randint(0, 4, (n,))


def weights(model: Any) -> Iterator[torch.Tensor]:
    for _, p in sorted(model.named_parameters()):
        yield p.detach()
    for _, b in sorted(model.named_buffers()):
        yield b.detach().clone()


# --- modes -----------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """A classifier whose first layers, with a norm and dropout, are a part of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU())
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.norm(self.first(self.back(x)))))


@loop
def a_backbone_is_frozen_and_in_eval_mode(made: Made) -> Iterator[Any]:
    """Fine-tuning: a part in eval mode in every epoch, its parameters frozen for a while, norms in eval mode by class,
    an optimizer with momentum and weight decay that has all parameters."""
    model = made(Backbone(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(n: int = 8) -> Iterator[Any]:
        x, y = rows(n)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield from (torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters())
        yield sum(p.grad is None for p in model.parameters())
        optimizer.step()
        yield loss

    for epoch in range(2):
        model.train()
        model.back.eval()
        model.back.requires_grad_(epoch == 1)
        yield from step()
        yield from step(5)
        yield from weights(model)
        model.eval()
        with torch.no_grad():
            yield model(rows()[0])
    model.train()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d | nn.Dropout):
            part.eval()
    yield from step()
    yield [part.training for part in model.modules()]
    model.eval()
    model.norm.train()
    yield from step()
    yield from weights(model)


class Target(nn.Module):
    """BYOL in small: a target that training averages, a centre, batches that are counted in both modes; scores in eval
    mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.target = copy.deepcopy(self.second).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        if not self.training:
            return out.softmax(1)
        with torch.no_grad():
            for mean, p in zip(self.target.parameters(), self.second.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
            wanted = self.target(hidden) - self.centre
            self.centre.mul_(0.9).add_(wanted.mean(0), alpha=0.1)
        return F.mse_loss(out, wanted)


@loop
def eval_mode_is_another_graph(made: Made) -> Iterator[Any]:
    """Averages and buffers that are renewed in training alone or in both modes, from either mode on."""
    for begins in (True, False):
        # what forward will write is stored whole where it is captured first as it writes it, or by a wish
        more = {} if begins else {"params": {"first.weight": "S0 step"}}
        model = made(Target().train(begins), rows()[0], **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for n in (8, 8, 5):
            model.eval()
            with torch.no_grad():
                yield model(rows(n)[0])
            model.train()
            optimizer.zero_grad()
            loss = model(rows(n)[0])
            loss.backward()
            optimizer.step()
            yield loss
            yield from weights(model)


# --- losses ----------------------------------------------------------------------------------------------------------


@loop
def rows_have_weights(made: Made) -> Iterator[Any]:
    """Weights of rows, the hardest rows alone, weights of classes, smoothing, mixed rows."""
    model = made(Classifier(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(5):
        x, y = rows()
        out = model(x)
        if i == 0:
            loss = (F.cross_entropy(out, y, reduction="none") * torch.rand(8)).mean()
        elif i == 1:
            loss = F.cross_entropy(out, y, reduction="none").topk(3).values.mean()
        elif i == 2:
            loss = nn.CrossEntropyLoss(weight=torch.rand(4), label_smoothing=0.1)(out, y)
        elif i == 3:
            loss = 0.3 * F.cross_entropy(out, y) + 0.7 * F.cross_entropy(out, y.flip(0))
        else:
            each = F.cross_entropy(out, y, reduction="none")
            loss = each[each > each.mean()].sum() / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
        yield (out.argmax(1) == y).sum().item()
    yield from weights(model)


@loop
def two_forwards_and_one_backward(made: Made) -> Iterator[Any]:
    """Siamese twins, a contrastive loss over all pairs of a batch, a sum of losses of two batches."""
    model = made(Encoder(), rows()[0])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for i in range(3):
        a, b = (F.normalize(model(rows()[0]), dim=1) for _ in range(2))
        if i == 0:
            loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(8))
        elif i == 1:
            loss = F.triplet_margin_loss(a, b, b.roll(1, 0))
        else:
            loss = a.square().mean() + F.cosine_embedding_loss(a, b, torch.ones(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    yield from weights(model)


@loop
def a_teacher_and_a_student(made: Made) -> Iterator[Any]:
    """Two parallel modules: distillation; then the teacher follows the student (BYOL, mean teacher)."""
    teacher, student = made(Classifier(), rows()[0]), made(Encoder(), rows()[0])
    optimizer = torch.optim.SGD(student.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        x, y = rows()
        teacher.eval()
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        out = student(x)
        loss = F.kl_div(out.log_softmax(-1), soft, reduction="batchmean") + F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    target = copy.deepcopy(student).requires_grad_(False)
    for _ in range(2):
        x, _ = rows()
        loss = F.mse_loss(student(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(student.parameters(), target.parameters(), strict=True):
                q.data.mul_(0.9).add_(p.data, alpha=0.1)
            torch._foreach_lerp_(list(target.parameters()), list(student.parameters()), 0.5)
        yield loss
    yield from weights(target)


@loop
def a_policy_is_trained(made: Made) -> Iterator[Any]:
    """PPO: probabilities of before, ratios, an entropy, several epochs on the same rows."""
    model = made(Encoder(), rows()[0])
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-5)
    x, action = rows()
    with torch.no_grad():
        before = torch.distributions.Categorical(logits=model(x)).log_prob(action)
    gain = torch.randn(8)
    for _ in range(3):
        for part in torch.arange(8).split(4):
            drawn = torch.distributions.Categorical(logits=model(x[part]))
            ratio = (drawn.log_prob(action[part]) - before[part]).exp()
            least = torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
            loss = -least.mean() - 0.01 * drawn.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss
    yield from weights(model)


@dataclasses.dataclass
class Given:
    loss: torch.Tensor
    scores: torch.Tensor
    name: str = "classifier"


class Pair(NamedTuple):
    loss: torch.Tensor
    scores: torch.Tensor


class Gives(nn.Module):
    """A loss and scores, as something of the kind that is asked for."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.kind = Encoder(), kind

    def forward(self, batch: dict[str, Any], extra: torch.Tensor | None = None) -> Any:
        scores = self.net(batch["x"])
        if extra is not None:
            scores = scores + extra
        loss = F.cross_entropy(scores, batch["y"])
        return self.kind(loss, scores) if self.kind is not dict else {"loss": loss, "scores": scores}


@loop
def batches_are_dicts_and_losses_are_fields(made: Made) -> Iterator[Any]:
    """Batches with strings and None in them, losses in dataclasses, named tuples and dicts."""
    for kind in (Given, Pair, dict):
        x, y = rows()
        model = made(Gives(kind), {"x": x, "y": y, "ids": ["a", "b"], "meta": {"source": "web", "none": None}}, None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(2):
            x, y = rows()
            meta = {"source": f"web{i}", "none": None}
            out = model({"x": x, "y": y, "ids": [f"row{i}", "b"], "meta": meta}, None)
            loss, scores = (out["loss"], out["scores"]) if kind is dict else (out.loss, out.scores)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
            yield scores
        yield from weights(model)


@dataclasses.dataclass(frozen=True)
class Examples:
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor | None = None


class OfExamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder()

    def forward(self, batch: Examples) -> Given:
        scores = self.net(batch.x)
        return Given(F.cross_entropy(scores, batch.y), scores)


@loop
def batches_are_dataclasses(made: Made) -> Iterator[Any]:
    model = made(OfExamples(), Examples(*rows()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in (8, 8, 6):
        out = model(Examples(*rows(n)))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield out.loss
        yield out.scores
    yield from weights(model)


# --- gradients -------------------------------------------------------------------------------------------------------


@loop
def gradients_are_changed_by_hand(made: Made) -> Iterator[Any]:
    """Noise, centralization, clipping unit by unit, logs, a NaN that skips the step."""
    model = made(Classifier(), rows()[0])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    logged: list[Any] = []
    noise = torch.Generator().manual_seed(3)
    for i in range(4):
        x, y = rows()
        loss = F.cross_entropy(model(x * (float("nan") if i == 2 else 1)), y)
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            model.norm.running_mean.zero_()
            model.norm.running_var.fill_(1)
            continue
        loss.backward()
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
                norm, bound = (t.norm(2, dim=1, keepdim=True) for t in (p.grad, p.detach()))
                bound = bound.clamp(min=1e-3) * 0.01
                p.grad.detach().copy_(torch.where(norm > bound, p.grad * (bound / norm.clamp(min=1e-6)), p.grad))
            p.grad.add_(torch.randn(p.shape, generator=noise) * 1e-3)
            logged.append(p.grad.clone())
        optimizer.step()
        yield loss
    yield from logged
    yield from weights(model)


@loop
def gradients_are_asked_for(made: Made) -> Iterator[Any]:
    """GradNorm's gradients of a shared layer, Fisher information row by row, a Jacobian, of an output."""
    model = made(Encoder(), rows()[0])
    x, y = rows()
    out = model(x)
    tasks = [F.cross_entropy(out, y), out.square().mean()]
    for task in tasks:
        (g,) = torch.autograd.grad(task, model.second.weight, retain_graph=True)
        yield g.norm()
    yield torch.autograd.grad(tasks[0], out, retain_graph=True)[0]
    (tasks[0] + 0.5 * tasks[1]).backward()
    yield from [p.grad.clone() for p in model.parameters()]
    fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(3):
        model.zero_grad()
        F.nll_loss(model(x[i : i + 1]).log_softmax(1), y[i : i + 1]).backward()
        for n, p in model.named_parameters():
            fisher[n] += p.grad.detach() ** 2 / 3
    yield from fisher.values()


@loop
def weights_are_moved_and_put_back(made: Made) -> Iterator[Any]:
    """FGM, noise on weights, SWAG's moments, a learning rate finder."""
    model = made(Encoder(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    mean, square = ({n: p.detach().clone() * 0 for n, p in model.named_parameters()} for _ in range(2))
    for i in range(3):
        x, y = rows()
        F.cross_entropy(model(x), y).backward()
        kept = {}
        for n, p in model.named_parameters():
            if p.requires_grad and "first" in n:
                kept[n] = p.data.clone()
                norm = torch.norm(p.grad)
                if norm != 0 and not torch.isnan(norm):
                    p.data.add_(0.5 * p.grad / norm)
        F.cross_entropy(model(x), y).backward()
        for n, p in model.named_parameters():
            if n in kept:
                p.data = kept[n]
        optimizer.step()
        optimizer.zero_grad()
        for n, p in model.named_parameters():
            mean[n].mul_(i / (i + 1)).add_(p.data / (i + 1))
            square[n] = square[n] * i / (i + 1) + p.data**2 / (i + 1)
    yield from mean.values()
    yield from square.values()
    before = {k: v.detach().cpu().clone() for k, v in model.state_dict().items() if torch.is_tensor(v)}
    for rate in (1e-3, 1e-2, 1e-1):
        optimizer.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    yield str(model.load_state_dict(before, strict=False)).count("first")
    yield from weights(model)


# --- parameters and optimizers ----------------------------------------------------------------------------------------


@loop
def parameters_are_told_apart(made: Made) -> Iterator[Any]:
    """Groups by identity, by hash and by marks of the model's, rates by layer, decay by hand, sums over all, bytes."""
    marked = Classifier()
    marked.first.bias._no_weight_decay = True
    model = made(marked, rows()[0])
    yield [n for n, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)].index("first.bias")
    head = set(map(id, model.second.parameters()))
    rest = [p for p in model.parameters() if id(p) not in head]
    decayed = {p for p in model.parameters() if p.ndim > 1}
    names = {p: n for n, p in model.named_parameters()}
    yield sum(len(names[p]) for p in model.parameters())
    yield sum(p in decayed for p in rest)
    yield sum(p.numel() * p.element_size() for p in model.parameters())
    yield len({p.data_ptr() for p in model.parameters()})
    optimizer = torch.optim.SGD(
        [{"params": rest, "lr": 0.01}, {"params": model.second.parameters()}], lr=0.1, nesterov=True, momentum=0.9
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=4)
    for _ in range(4):
        x, y = rows()
        loss = F.cross_entropy(model(x), y) + 1e-3 * torch.cat([p.view(-1) for p in model.parameters()]).abs().sum()
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            torch._foreach_mul_(rest, 1 - 0.01)
            for p in decayed:
                p.data.add_(p.data, alpha=-0.001)
        yield sum(g.square() for g in torch._foreach_norm([p.grad for p in model.parameters()])).sqrt()
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
        yield total
        optimizer.step()
        schedule.step()
        yield loss
    yield from weights(model)


@loop
def phases_of_a_tutorial(made: Made) -> Iterator[Any]:
    """torchvision's transfer learning: phases, ``set_grad_enabled``, the best weights, then another rate."""
    model = made(Classifier(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = [rows(), rows(), rows(5)]
    best, kept = -1.0, copy.deepcopy(model.state_dict())
    for _ in range(3):
        for phase in ("train", "val"):
            model.train(phase == "train")
            running = right = 0.0
            for x, y in data:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x)
                    _, found = torch.max(out, 1)
                    loss = nn.CrossEntropyLoss()(out, y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running += loss.item() * x.size(0)
                right += torch.sum(found == y.data).double()
            if phase == "train":
                schedule.step()
            elif right > best:
                best, kept = float(right), copy.deepcopy(model.state_dict())
            yield running
            yield right
    model.load_state_dict(kept)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.2
    again = torch.optim.SGD(model.parameters(), lr=1)
    again.load_state_dict(state)
    model.train()
    x, y = data[0]
    F.cross_entropy(model(x), y).backward()
    again.step()
    yield from weights(model)


@loop
def modes_are_mixed_in_a_step(made: Made) -> Iterator[Any]:
    """Pseudo labels by the model in eval mode, between the forward and the backward of the same step."""
    model = made(Classifier(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x, y = rows()
        other, _ = rows()
        loss = F.cross_entropy(model(x), y)
        model.eval()
        with torch.no_grad():
            pseudo = model(other).argmax(-1)
        model.train()
        loss = loss + 0.5 * F.cross_entropy(model(other), pseudo)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
        yield pseudo
    yield from weights(model)


@loop
def statistics_stay_in_the_second_forward(made: Made) -> Iterator[Any]:
    """SAM as its authors have it: ``apply`` gives batch norms the momentum 0, and then that of before."""

    def disable(module: nn.Module) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.backup_momentum = module.momentum
            module.momentum = 0

    def enable(module: nn.Module) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and hasattr(module, "backup_momentum"):
            module.momentum = module.backup_momentum

    model = made(Classifier(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x, y = rows()
        model.apply(enable)
        F.cross_entropy(model(x), y).backward()
        kept = {p: p.detach().clone() for p in model.parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * p.grad)
        model.zero_grad()
        model.apply(disable)
        yield model.norm.momentum
        twin = copy.deepcopy(model)  # whose statistics stay, too, until it is told otherwise
        twin(x)
        yield twin.norm.momentum
        yield twin.norm.running_mean.clone()
        twin.apply(enable)
        twin(x)
        yield twin.norm.running_mean.clone()
        loss = F.cross_entropy(model(x + 1), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(kept[p])
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield from weights(model)
    model.eval()
    yield model(x)


@loop
def watched_by_autograd(made: Made) -> Iterator[Any]:
    """Anomaly detection, saved tensors on the CPU, hooks on the whole module in both directions."""
    model = made(Encoder(), rows()[0].requires_grad_())
    seen: list[Any] = []
    handles = [
        model.register_full_backward_hook(lambda module, given, out: seen.extend([given[0], out[0]])),
        model.register_forward_hook(lambda module, args, out: out * 2),
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    ]
    for i in range(4):
        x, y = rows()
        x.requires_grad_()
        with torch.autograd.set_detect_anomaly(i == 0), torch.autograd.graph.save_on_cpu() if i == 1 else io.BytesIO():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        yield loss
        yield x.grad
        if i == 2:
            for handle in handles:
                handle.remove()
    yield len(seen)
    yield from seen
    yield from [p.grad for p in model.parameters()]


# --- data ------------------------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(i)
        return {"x": torch.randn(8, generator=made), "y": i % 4, "id": f"row {i}"}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        told = torch.utils.data.get_worker_info()
        return (Rows()[i] for i in range(told.id if told else 0, 22, told.num_workers if told else 1))


@loop
def loaders_of_every_kind(made: Made) -> Iterator[Any]:
    """Worker processes, pinned memory, streams, weighted draws, batches that a collate function makes."""
    model = made(Classifier(), rows()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # Adam would show rounding: a norm follows `first`
    drawn = WeightedRandomSampler(torch.arange(1.0, 23), 22, generator=torch.Generator().manual_seed(5))
    loaders: list[Any] = [
        DataLoader(Rows(), 8, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(2)),
        DataLoader(Stream(), 8, num_workers=2),
        DataLoader(Rows(), 8, sampler=drawn, drop_last=True, pin_memory=torch.accelerator.is_available()),
        itertools.islice(itertools.cycle(DataLoader(Rows(), 5)), 6),
    ]
    for loader in loaders:
        for batch in loader:
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
    yield from weights(model)


# --- what is refused -------------------------------------------------------------------------------------------------


@refused_loop("RunError: parameter 'first.weight' was written in place with gradients on .*no_grad")
def an_average_with_a_graph(made: Made) -> Iterator[Any]:
    """In eager mode the average's gradient flows on into the model, step by step through all the steps before."""
    model = made(Encoder(), rows()[0])
    target = copy.deepcopy(model).requires_grad_(False)
    torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 0.5)
    yield target(rows()[0])


class Balanced(nn.Module):
    """Leaves in attributes what callers add to the loss and log, and activations that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.balance: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.first(x))
        share = h.softmax(-1).mean(0)
        self.balance, self.shares = (share * share).sum() * 16, share.detach()
        self.logged = {"largest": h.detach().max(), "both": (h.sum(), h.mean())}
        return x + self.second(h)


class KeepsItsLoss(nn.Module):
    """llama2.c's model: scores are returned, and the loss is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.first, self.last_loss = nn.ModuleList([Balanced(), Balanced()]), nn.Linear(8, 4), None

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        out = self.first(x)
        self.last_loss = None if y is None else F.cross_entropy(out, y)
        return out


@loop
def losses_are_left_in_attributes(made: Made) -> Iterator[Any]:
    model = made(KeepsItsLoss(), *rows())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in (8, 8, 6, 8):
        x, y = rows(n)
        out = model(x, y)
        parts = [module for module in model.modules() if hasattr(module, "balance")]
        loss = model.last_loss + 0.5 * sum(part.balance for part in parts) + 0.01 * out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
        yield model.last_loss
        yield len(parts)
        yield parts[1].logged["largest"]
        yield parts[0].logged["both"][1]
    model.eval()
    with torch.no_grad():
        yield model(x, y)
        yield model.last_loss
        yield model(x)
        yield model.last_loss is None
    model.train()
    yield model(x, y)
    model.last_loss.backward()
    yield from weights(model)


class KeepsInLists(nn.Module):
    """Has a list and a dict from the beginning, and fills them in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.losses: dict[str, torch.Tensor] = {}
        self.sizes: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.second(torch.tanh(self.first(x)))
        self.losses["loss"] = F.cross_entropy(out, y)
        self.losses["size"] = out.square().mean()
        self.sizes.append(out.detach().abs().mean())
        return out


@loop
def losses_are_left_in_lists(made: Made) -> Iterator[Any]:
    model = made(KeepsInLists(), *rows())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in (8, 5, 8):
        model(*rows(n))
        optimizer.zero_grad()
        sum(model.losses.values()).backward()
        optimizer.step()
        yield model.losses["loss"]
    yield torch.stack(model.sizes)
    model.sizes.clear()
    model(*rows())
    yield torch.stack(model.sizes)
    yield from weights(model)


@refused_loop(r"RunError: forward sets the attribute 'parts.1.shares' of the model")
def activations_are_left_in_attributes(made: Made) -> Iterator[Any]:
    model = made(KeepsItsLoss(), *rows())
    model(*rows())
    yield model.parts[1].shares
