"""What one rank does in the tests of what people do.

Each function trains a small model in a way that scripts do, beside the same model in eager mode, and returns the worst
relative difference, or what was said.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from habits.given import Draws, Given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import planfile as files
from autopar.capture import capture
from autopar.cli.common import optimizer_of
from autopar.cli.run import train
from autopar.comparison.program_vs_eager import inputs_of
from autopar.frontends.models import load_model
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.planner.intra_op.mesh_plan import Options
from autopar.rules.families.sharded_random import seed_at
from autopar.runtime.stages.seeds import seed_after
from hardware_profiles import load_cluster

CUT = {"constraints": {"*up": {"data": "b"}}}
"""The batch is cut over the ranks."""
TOTAL_NORM = torch.nn.utils.get_total_norm
"""A reference from before a pipeline is made."""
PIPED = {"stages": 2, "schedule": "1f1b", "microbatches": 2, "cuts": ["down"]}


class Net(nn.Module):
    """Two layers, dropout where it is asked for, and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(6, 12), nn.Dropout(dropout), nn.Linear(12, 6)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.drop(self.up(x).relu())) - x).square().mean()


def batches(n: int, rows: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(n)]


def spread(model: nn.Module, piped: bool, x: torch.Tensor, **options: Any) -> Any:
    """The model on two ranks: its batch cut, or in two stages."""
    if piped:
        return autopar.parallelize(model, 2, x, **{**PIPED, **options})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    return autopar.parallelize(model, mesh, x, **{**CUT, **options})


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """One step of training; returns the loss."""
    if hasattr(model, "train_step"):
        return float(model.train_step(x, optimizer=optimizer))
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def difference(found: Any, wanted: Any) -> float:
    a, b = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (found, wanted))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def weights(pm: nn.Module, model: nn.Module) -> float:
    """Worst difference of the parameters that this rank holds."""
    wanted = dict(model.named_parameters())
    return max((difference(whole(p), wanted[name]) for name, p in pm.named_parameters()), default=0.0)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "named": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def optimizer_before(kind: str, piped: bool, params: Mapping[str, str] | None = None) -> float:
    """Two steps in eager mode, then parallelize with the optimizer: groups, options, state and scheduler go on."""
    found = []
    model, xs = Net(), batches(5)
    alone = copy.deepcopy(model)
    for moved in (True, False):
        own = model if moved else alone
        groups: Any = [
            {"params": own.up.parameters(), "weight_decay": 0.1}, {"params": own.down.parameters(), "lr": 0.05},
        ]  # fmt: skip
        optimizer = OPTIMIZERS[kind](own.named_parameters() if kind == "named" else groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        losses = [step(own, optimizer, x + (dist.get_rank() if moved and i == 1 else 0)) for i, x in enumerate(xs[:2])]
        if moved and dist.get_rank():  # rank 0's weights and state count
            losses = []
        used: Any = spread(model, piped, xs[0], optimizer=optimizer, params=params) if moved else own
        for x in xs[2:]:
            losses.append(step(used, optimizer, x))
            scheduler.step()
        found.append((losses[-3:], used))
    return max(difference(found[0][0], found[1][0]), weights(found[0][1], alone))


class Dropping(nn.Module):
    """Layers that are left out at random: a weight that two of them share, one that is also read outside, one that is
    frozen, and a side that gives no numbers where it is not taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.shared, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers[2].weight.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.outer(x)
        for i, layer in enumerate(self.layers):
            draw = torch.rand(())
            if draw < 0.5:
                h = h + torch.tanh(layer(h))
                if i in (0, 3):
                    h = h + self.shared(h)
                if i == 1:
                    h = h + self.outer(h) / (self.outer(h).detach() * 0 + (draw < 0.5))
        return (h - x).square().mean() + self.outer(x).square().mean()


LEFT_OUT: dict[tuple[str, int], dict[str, Any]] = {
    ("data", 2): {"constraints": {"*": {"data": "b"}}},
    ("tensor", 1): {"constraints": {"*linear*": {"data": "n"}}},
    ("ZeRO-1", 2): {"params": {"*": "S0 step"}, "constraints": {"*": {"data": "b"}}},
    ("ZeRO-3", 1): {"params": {"*": "S0 use"}, "constraints": {"*": {"data": "b"}}},
    ("ZeRO-3 that recomputes", 2): {"params": {"*": "S0 use"}, "recompute": ["layers.*"]},
    ("pipeline", 2): {"stages": 2, "schedule": "1f1b", "microbatches": 2, "cuts": ["layers.2"]},
    ("halves", 2): {"stages": 2, "schedule": "zb-h1", "microbatches": 2, "cuts": ["layers.2"]},
}
"""Options under which layers are left out, with a number of microbatches."""


def left_out(how: str, k: int) -> float:
    """Five steps of AdamW, of ``k`` microbatches each, where the model in eager mode has the same draws.

    A parameter that nothing reached has no gradient: AdamW leaves it alone, weight decay included.
    """
    model, xs = Dropping(), batches(5, 8)
    alone, rows = copy.deepcopy(model), 8 // k
    captured = capture(alone, (xs[0][:rows],))
    place: Any = {"pipeline": 2, "halves": 2, "alone": 1}.get(how)
    if place is None:
        place = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    given = xs[0] if place == 2 else xs[0][:rows]  # a step's batch; train_step adds up over several such, too
    pm = autopar.parallelize(model, place, given, **LEFT_OUT.get((how, k), {}))
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
        for m in (pm, alone)
    ]
    worst, missing, heard = 0.0, [], ([], [])
    for m, calls_of in zip((pm, alone), heard, strict=True):
        params = dict(m.named_parameters())
        for name in ("layers.0.weight", "layers.1.weight", "outer.weight") if k == 1 else ():
            params[name].register_hook(lambda _, n=name, c=calls_of: c.append(n))
            params[name].register_post_accumulate_grad_hook(lambda _, n=name, c=calls_of: c.append(f"after {n}"))
    for i, x in enumerate(xs):
        torch.manual_seed(i)
        if k == 1 and place != 2:
            loss = pm(x)
            loss.backward()
        else:
            loss = pm.train_step(x)
        total = 0.0
        for j, part in enumerate(x.split(rows)):
            values = {n: v.detach() for n, v in alone.named_parameters()} | inputs_of(captured, (part,), {})
            draws = Draws(captured).with_values(values, seed_at(torch.tensor(seed_after(i)), j * rows, rows, rows))
            with Given(draws.drawn):
                own = alone(part) / k
            own.backward()
            total += float(own.detach())
        wanted = dict(alone.named_parameters())
        for name, p in pm.named_parameters():
            assert (p.grad is None) == (wanted[name].grad is None), f"gradient of {name} in step {i}"
            if p.grad is not None:
                worst = max(worst, difference(whole(p.grad), wanted[name].grad))
        missing += [n for n, p in wanted.items() if p.grad is None and p.requires_grad]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, difference(float(loss.detach()), total), weights(pm, alone))
    assert missing, "everything had a gradient in every step"
    assert sorted(heard[0]) == sorted(heard[1]), "hooks of parameters are called as in eager mode"
    return worst


def old_optimizer(piped: bool) -> str:
    """An optimizer of the old parameters, without moving it."""
    model, x = Net(), batches(1)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    pm = spread(model, piped, x)
    return said(lambda: pm.train_step(x, optimizer=optimizer))


class Weighted(Net):
    """The loss reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.down(self.up(x).relu()) - x).square() * self.weight).mean()


def loaded(piped: bool, assign: bool) -> float:
    """Whole state dicts, with new values of buffers, are loaded on the way; optimizers are made anew (for assign)."""
    xs, worst = batches(4), 0.0
    model = Weighted()
    alone = copy.deepcopy(model)
    used: Any = spread(model, piped, xs[0], params=None if piped else {"*.weight": "S0 use"})
    for i, x in enumerate(xs):
        if i % 2 == 0:
            for m in (used, alone):  # of a pipeline, each rank holds a part
                state = {k: v * (2 + i) + 0.1 for k, v in Weighted().state_dict().items()}
                m.load_state_dict(state, assign=assign, strict=not piped)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (used, alone)]
        losses = [step(m, o, x) for m, o in zip((used, alone), optimizers)]
        worst = max(worst, difference(*losses), weights(used, alone))
    return worst


def buffer_by_hand() -> list[Any]:
    """Another tensor is put in a buffer's place: it counts, or is refused where it does not fit."""
    x = batches(1)[0]
    model = Weighted()
    alone = copy.deepcopy(model)
    pm = spread(model, False, x)
    new = torch.linspace(3.0, 4.0, 6, dtype=torch.float64)
    pm.weight, alone.weight = new, new.clone()
    worst = difference(pm(x), alone(x))
    pm.weight = new.float()
    return [worst, said(lambda: pm(x))]


def mode_by_hand(piped: bool) -> float:
    """``training = False`` of a module and its dropout is ``eval()``, and back."""
    x, model = batches(1)[0], Net(0.5)
    alone = copy.deepcopy(model).eval()
    pm = spread(model, piped, x)
    pm.training = pm.drop.training = False
    with torch.no_grad():
        found = difference(pm(x), alone(x))
    pm.training = pm.drop.training = True
    losses = [pm.train_step(x) for _ in range(2)]
    assert losses[0] != losses[1], "dropout is on again"
    return found


def refused(what: str, piped: bool) -> str:
    """What is said to a call."""
    x, model = batches(1)[0], Net(0.5)
    pm = spread(model, piped, x)
    if what == "eval step":
        pm.eval()
        return said(lambda: pm.train_step(x))
    if what == "clip":
        from torch.nn.utils import clip_grad_norm_

        pm.train_step(x)
        return said(lambda: clip_grad_norm_(pm.parameters(), 1.0))
    if what == "total norm":
        pm.train_step(x)
        return said(lambda: TOTAL_NORM([p.grad for p in pm.parameters()]))
    return said(lambda: getattr(pm, what)())


def clips(piped: bool) -> float:
    """The norm of all stages is right; torch's own stays right for everything else."""
    x, model = batches(1)[0], Net()
    alone = copy.deepcopy(model)
    pm = spread(model, piped, x)
    pm.train_step(x)
    alone(x).backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    found = pm.clip_grad_norm_(0.1) if piped else whole(torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.1))
    grads = dict(alone.named_parameters())
    return max(difference(found, wanted), *(difference(whole(p.grad), grads[n].grad) for n, p in pm.named_parameters()))


class Written(nn.Linear):
    """A layer whose forward writes its weight: masked, in bounds, and in training a little smaller at every call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.arange(inputs) % 3 > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
            if self.training:
                self.weight.mul_(0.9)
        return super().forward(x)


class WrittenNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Written(6, 12), Written(12, 6)
        self.double()


def writes(piped: bool, **options: Any) -> float:
    """Three steps and an evaluation of a model that writes trained parameters in forward."""
    xs, model = batches(4), WrittenNet()
    alone = copy.deepcopy(model)
    pm = spread(model, piped, xs[0], **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pm, alone)]
    worst = 0.0
    for x in xs[:3]:
        loss = alone(x)
        loss.backward()
        worst = max(worst, difference(pm.train_step(x), loss.detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pm.eval(), alone.eval()
    with torch.no_grad():
        worst = max(worst, difference(pm(xs[3]), alone(xs[3])))
    found = autopar.full_state_dict(pm)
    states = alone.state_dict()
    for name, value in found.items():  # on rank 0
        worst = max(worst, difference(value, states[name]) if value.is_floating_point() else 0.0)
    return worst


def stored_and_written() -> float:
    """:func:`writes` with weights in pieces, gathered for each use."""
    return writes(False, params={"*.weight": "S0 use", "*.bias": "S0 step"})


class Masked(nn.Module):
    """A block as of nanoGPT: a mask that is its own buffer, beside a dropout that is used twice."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(inputs, outputs), nn.Dropout(dropout)
        self.register_buffer("mask", torch.linspace(0.5, 2.0, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(self.drop(x)) * self.mask)


class MaskedNet(Net):
    """Each stage of its pipeline has a block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.up, self.down = Masked(6, 12, dropout), Masked(12, 6, dropout)
        self.double()


def resumed(piped: bool, how: str, path: str, kind: type[Net] = Net) -> float:
    """Three steps with dropout, saved, and two more: as those of another run that loads what was saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dsd

    xs = batches(5)
    made = []
    for _ in range(2):
        pm = spread(kind(0.5), piped, xs[0])
        made.append((pm, torch.optim.AdamW(pm.parameters(), lr=0.01)))
    (pm, optimizer), (other, later) = made
    torch.manual_seed(dist.get_rank() + 17)
    for x in xs[:3]:
        step(pm, optimizer, x)
    if how == "state_dict":
        state = {k: v.clone() for k, v in pm.state_dict().items()}
        steps = copy.deepcopy(optimizer.state_dict())
    elif how == "dcp":
        model_state, optimizer_state = dsd.get_state_dict(pm, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    elif how == "full":
        whole_state = autopar.full_state_dict(pm)
        assert "_extra_state" not in whole_state
    losses = [[step(pm, optimizer, x) for x in xs[3:]], []]
    if how == "state_dict":
        other.load_state_dict(state)
        later.load_state_dict(steps)
    elif how == "dcp":
        step(other, later, xs[0])
        model_state, optimizer_state = dsd.get_state_dict(other, later)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        dsd.set_state_dict(other, later, model_state_dict=model_state, optim_state_dict=optimizer_state)
    elif how == "full":
        plain = kind(0.5)
        if dist.get_rank() == 0:
            plain.load_state_dict(whole_state)
        for given in (whole_state if dist.get_rank() == 0 else None, autopar.full_state_dict(pm, all_ranks=True)):
            autopar.load_full_state_dict(other, given)
        return max(
            difference(v, autopar.full_state_dict(pm, all_ranks=True)[k])
            for k, v in autopar.full_state_dict(other, all_ranks=True).items()
        )
    losses[1] = [step(other, later, x) for x in xs[3:]]
    return difference(*losses)


class Viewed(nn.Module):
    """Reads parameters through views long after it has made them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.table, self.up, self.down = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 12), nn.Linear(12, 6)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "diagonal":
            seen = self.table.diagonal()
        elif self.how == "unfold":
            seen = self.table.unfold(1, 6, 6)[2, 0]
        elif self.how == "einsum":
            seen = torch.einsum("ij->ji", self.table)[1]
        elif self.how == "dropout":
            seen = nn.functional.dropout(self.table, 0.0, self.training)[3]
        else:
            seen = self.table.T.movedim(0, 1).swapaxes(0, 1).unflatten(0, (2, 3))[1, 2].expand(8, 6)
        h = self.down(self.up(x).relu())
        return (h * seen.sigmoid() * seen - x).square().mean()


VIEWS = ("diagonal", "unfold", "einsum", "dropout", "many")


def viewed(how: str) -> float:
    """ZeRO-3: a gathered parameter is not freed while a view of it is to be read."""
    model, xs = Viewed(how), batches(3)
    alone = copy.deepcopy(model)
    pm = spread(model, False, xs[0], params={"*": "I use", "*.weight": "S0 use", "table": "S0 use"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, alone)]
    return max(difference(*(step(m, o, x) for m, o in zip((pm, alone), optimizers))) for x in xs)


DIFFERING: dict[str, list[dict[str, Any]]] = {
    "constraints": [{"constraints": CUT["constraints"]}, {"constraints": None}],
    "microbatches": [{"microbatches": 1}, {"microbatches": 2}],
    "memory_limit": [{"memory_limit": "1GB"}, {"memory_limit": "2GB"}],
    "example_inputs": [{"example_inputs": torch.zeros(8, 6)}, {"example_inputs": torch.zeros(4, 6)}],
    "optimizer": [{"optimizer": "sgd"}, {"optimizer": "adamw"}],
    "stages": [{"stages": 2}, {"stages": None}],
    "mesh": [{"mesh": 2}, {"mesh": "local-x2"}],
    "model": [{}, {"model": Net().eval()}],
    "wrong type on one": [{}, {"cuts": "down"}],
    "rows of a local example": [
        {"batch": "local", "example_inputs": torch.zeros(n, 6, dtype=torch.float64)} for n in (8, 5)
    ],
}


def differing(what: str) -> str:
    """Ranks that call parallelize with different arguments."""
    call = {"model": Net(), "mesh": 2, "example_inputs": torch.zeros(8, 6, dtype=torch.float64)}
    call.update(DIFFERING[what][dist.get_rank()])
    return said(lambda: autopar.parallelize(**call))


def stage_without_parameters() -> float:
    """The last stage is the loss alone: a script's optimizer is made on every rank."""
    model, xs = Net(), batches(3)
    alone = copy.deepcopy(model)
    pm = spread(model, True, xs[0], cuts=["sub"])
    assert len(dict(pm.named_parameters())) == (4, 0)[dist.get_rank()]
    worst = 0.0
    for kind in ("adamw", "momentum"):
        optimizers = [OPTIMIZERS[kind](m.parameters()) for m in (pm, alone)]
        for x in xs:
            worst = max(worst, difference(*(step(m, o, x) for m, o in zip((pm, alone), optimizers))))
    pm.clip_grad_norm_(1.0)
    return max(worst, weights(pm, alone), run_of_a_stage_without_parameters())


WITHOUT_PARAMETERS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.tail = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x):
        return self.tail(self.body(x)).square().mean()


def make():
    torch.manual_seed(0)
    return Net().double(), (torch.ones(2, 6, dtype=torch.float64),)
"""


def run_of_a_stage_without_parameters() -> float:
    """What every rank of ``autopar run`` does with such a plan file: losses as without a plan."""
    worst = 0.0
    for name, lr in (("adamw", 1e-2), ("sgd_momentum", 0.1)):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "net.py").write_text(WITHOUT_PARAMETERS)
            loaded = load_model("net.py:make", folder=Path(folder))
            graph = capture(loaded.model, loaded.args, loaded.kwargs).graph
            second = next(n.name for n in graph.nodes if n.module == "tail")
            option = PipelineOptions(2, schedules=("1f1b",), starts=[second], options=Options(optimizer=name))
            plan = plan_pipeline(graph, load_cluster("local-x2"), 2, option).plan
            (Path(folder) / "plan.json").write_text(files.dumps(plan, graph, {"spec": "net.py:make", "parts": 1}))
            found = train(str(Path(folder) / "plan.json"), None, 3, lr)["losses"]
            one = load_model("net.py:make", folder=Path(folder), device="cpu")
        optimizer = optimizer_of(name, list(one.model.parameters()), lr)
        for loss in found:
            expected = one.model(*one.args)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            worst = max(worst, abs(loss - expected.item()))
    return worst


BUILDS = {
    "the stages": ("pipelines.pipeline", "cut", 1), "a parameter": ("stages.registering", "as_dtensor", 2),
    "the last step": ("stages.stage", "make_units", 1), "the messages": ("pipelines.rank_actions", "Ties", 1),
    "values": ("", "", 0),
}  # fmt: skip


def built(where: str, failing: int) -> list[Any]:
    """Building a pipeline fails on one rank: what this rank hears, and after how many seconds."""
    file, name, call = BUILDS[where]
    x, start = batches(1)[0], time.monotonic()

    def init(module: nn.Module) -> None:
        if dist.get_rank() == failing:
            raise RuntimeError("out of memory")
        for p in module.parameters(recurse=False):
            nn.init.zeros_(p)

    if not file:
        return [said(lambda: spread(Net().to("meta"), True, x, init=init)), time.monotonic() - start]
    there = importlib.import_module(f"autopar.runtime.{file}")
    real, count = getattr(there, name), itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == failing and next(count) == call:
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    with mock.patch.object(there, name, fails):
        return [said(lambda: spread(Net(), True, x)), time.monotonic() - start]
