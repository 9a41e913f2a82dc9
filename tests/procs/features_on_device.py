"""What one rank does to train on an accelerator that is not there (:mod:`accelerator`) in the ways that scripts ask for
beside a plain step, and beside the same module on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerator import NAME, Accelerator
from emulated_nccl import BACKEND
from procs.on_device import begin_world
from procs.ways import Clamps
from procs.ways import batch as of_clamps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autopar
from autopar.errors import RunError
from autopar.parallelizing import all_ranks

Batch = tuple[torch.Tensor, ...]
FEATURES = (
    "labels", "labels in stages", "terms", "terms in stages", "policy", "policy by columns", "policy in stages",
    "own rows", "own rows in microbatches", "scaler", "scaler in stages", "summed in float32",
)
TOLD = "uneven_rows.__call__"
"""Where hosts tell each other how many rows each has, which has nothing to do with the device."""
STEPS = 6
COMPARED = 3
"""The first calls are compared between the ranks at once, so that the host waits."""
CUT: dict[str, Any] = {"constraints": {"*up": {"data": "b"}}}
ZERO: dict[str, Any] = {**CUT, "params": {"*.weight": "S0 use"}}
COLUMNS: dict[str, Any] = {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}}
PIPED: dict[str, Any] = {"stages": 2, "schedule": "1f1b", "microbatches": 2, "cuts": ["down"]}


class Net(nn.Module):
    """Labels, of which some do not count; a second term of the loss, where it is asked for."""

    def __init__(self, terms: int = 1, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.terms = terms
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)
        if norm:
            self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = self.down(self.norm(self.up(x)).relu())
        loss = F.cross_entropy(out, labels, ignore_index=0)
        return loss if self.terms == 1 else loss + out.square().mean()


def labelled(number: int, rows: int = 8) -> Batch:
    """The first half has fewer labels that count."""
    g = torch.Generator().manual_seed(number)
    labels = torch.randint(1, 6, (rows,), generator=g)
    labels[: rows // 4 + number % 2] = 0
    return torch.randn(rows, 6, generator=g), labels


def own(batch: Batch) -> Batch:
    """This rank's rows."""
    return tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)


def there(batch: Any) -> Any:
    """A batch on the accelerator."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(NAME), batch)


def on(device: str, model: nn.Module, batch: Batch, options: Mapping[str, Any], stack: ExitStack) -> Any:
    """What ``parallelize`` gives, on two ranks; where the device is the accelerator, what it has captured and planned
    on the CPU is spread over that: a capture knows nothing of the emulation.

    Args:
        stack: until its end there is the accelerator.
    """
    real = all_ranks.spread

    def spread(
        model: nn.Module, captured: Any, plan: Any, group: Any, *, device_mesh: Any, init: Any, random: str
    ) -> Any:
        if device == NAME:
            stack.enter_context(Accelerator())
        if device_mesh is not None:
            names, shape = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
            device_mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        there = copy.deepcopy(model).to(device)
        return real(there, captured, plan, group, device_mesh=device_mesh, init=init, random=random)

    where = 2 if "stages" in options else init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    with mock.patch.object(all_ranks, "spread", spread):
        return autopar.parallelize(copy.deepcopy(model), where, batch, **options)


def trained(
    model: nn.Module, batches: Sequence[Batch], options: Mapping[str, Any], scales: bool = False
) -> tuple[float, list[str]]:
    """How far losses and weights on the accelerator are from those on the CPU, and what steps on it did that
    they should not.

    Args:
        scales: a scaler scales the loss; it reads itself whether the optimizer's step is made.
    """
    torch.manual_seed(0)
    kept: list[list[torch.Tensor]] = []
    noticed: list[str] = []
    for device in ("cpu", NAME):
        with ExitStack() as stack:
            torch.manual_seed(3)
            pm = on(device, model, batches[0], options, stack)
            optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, foreach=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scales else None
            values: list[torch.Tensor] = []
            for number in range(STEPS):
                batch = batches[number % len(batches)]
                batch = there(batch) if device == NAME else batch
                with watched() as seen:
                    values.append(pm.train_step(*batch, scaler=scaler))
                    if scaler is None:
                        optimizer.step()
                        optimizer.zero_grad()
                if scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                noticed += [line for line in seen if TOLD not in line] if number >= COMPARED else []
            weights = autopar.full_state_dict(pm, all_ranks=True).values()
            kept.append([x.detach().to("cpu").double() for x in (*values, *weights) if x.is_floating_point()])
            if Accelerator.current is not None:
                noticed += Accelerator.current.collectives.forgotten
    worst = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(*kept, strict=True))
    return worst, list(dict.fromkeys(noticed))


def another_way() -> tuple[int, str, float]:
    """A call whose branch on data goes another way than in the example: in which later call that is an error, which,
    and how far losses of calls after that are from those of the model alone."""
    begin_world(f"cpu:gloo,{NAME}:{BACKEND}")
    torch.manual_seed(0)
    model = Clamps()
    columns = {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}}
    heard, text, worst = -1, "", 0.0
    with ExitStack() as stack:
        pm = on(NAME, model, of_clamps(0), columns, stack)
        for number in range(12):
            batch = of_clamps(number, 1e7 if number == 4 else 1.0)
            try:
                loss = pm(*there(batch)).detach().to("cpu")
                loss_alone = model(*batch).detach()
                if number != 4:
                    worst = max(worst, float(abs(loss - loss_alone)))
            except RunError as error:
                assert heard < 0, error
                heard, text = number, str(error)
    begin_world("cpu:gloo")
    return heard, text, worst


@contextmanager
def watched() -> Iterator[list[str]]:
    """Notes what makes the host wait, where there is an accelerator."""
    if Accelerator.current is None:
        yield []
        return
    with Accelerator.current.watching() as seen:
        yield seen


def features(names: Sequence[str]) -> dict[str, tuple[float, list[str]]]:
    """By feature, what :func:`trained` gives, or what else there is to say."""
    begin_world(f"cpu:gloo,{NAME}:{BACKEND}")
    plain = [labelled(k) for k in range(3)]
    some = {"microbatches": 2}
    policy = {"precision": "bf16-mixed"}
    rows = {"batch": "local"}
    cases: dict[str, tuple[nn.Module, Sequence[Batch], dict[str, Any]]] = {
        "labels": (Net(), plain, {**CUT, **some}),
        "labels in stages": (Net(), plain, PIPED),
        "terms": (Net(2), plain, {**CUT, **some}),
        "terms in stages": (Net(2), plain, PIPED),
        "policy": (Net(), plain, {**ZERO, **policy}),
        "policy by columns": (Net(), plain, {**COLUMNS, **policy}),
        "policy in stages": (Net(), plain, {**PIPED, **policy}),
        "own rows": (Net(norm=True), [own(each) for each in plain], {**ZERO, **rows}),
        "own rows in microbatches": (Net(), [own(each) for each in plain], {**CUT, **rows, **some}),
        "scaler": (Net(), plain, ZERO),
        "scaler in stages": (Net(), plain, PIPED),
        "summed in float32": (Net().bfloat16(), [(x.bfloat16(), y) for x, y in plain],
                              {**ZERO, "gradient_dtype": torch.float32}),
    }  # fmt: skip
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            found[name] = trained(*cases[name], scales="scaler" in name)
    begin_world("cpu:gloo")
    return found
