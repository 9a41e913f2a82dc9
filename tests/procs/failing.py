"""A rank that fails in a step of a model on one mesh, or while a model is spread, and does not go away: what the others
hear, and how soon."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.habits_of_use import ROWS, Net, mse
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import RunError
from autopar.runtime.gradients.step_gradients import Gradients
from autopar.runtime.ranks import failures
from autopar.runtime.ranks.agree import FirstRankValues
from autopar.runtime.stages.stage import Stage

CUTS: dict[str, dict[str, Any]] = {
    "rows": {"constraints": ROWS},
    "rows, ZeRO": {"constraints": ROWS, "params": {"*": "S0 use"}},
}
WHERE = ("forward", "backward", "accumulating", "evaluation", "optimizer", "end of the backward")


def batch(rows: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank, however many it has asked for."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=made), torch.randn(rows, 4, generator=made)


class Trouble(Exception):
    """What the failing rank raises."""


@contextlib.contextmanager
def trouble(pm: Any, where: str) -> Iterator[None]:
    """The rank that is in this context fails there."""

    def fail(*args: Any, **options: Any) -> Any:
        raise Trouble(f"on purpose in the {where}")

    if where in ("forward", "evaluation"):
        with mock.patch.object(Stage, "run", fail):
            yield
    elif where == "end of the backward":  # after all that the ranks do together in it
        with mock.patch.object(Gradients, "handed", fail):
            yield
    elif where == "optimizer":
        with mock.patch.object(torch.optim.SGD, "step", fail):
            yield
    else:
        # An exception in the last parameter of the backward, after which come the reductions of all of them.
        hook = next(iter(pm._autopar.held_params.values())).leaf.register_post_accumulate_grad_hook(fail)
        try:
            yield
        finally:
            hook.remove()


def step(pm: Any, where: str) -> None:
    """One step of training, as scripts write it; or one of evaluation."""
    x, y = batch()
    if where == "evaluation":
        with torch.no_grad():
            pm.eval()(x, y)
    elif where in ("accumulating", "optimizer"):
        pm.train_step(*batch(16), microbatches=2, optimizer=torch.optim.SGD(pm.parameters(), lr=0.1))
        float(torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0))
    else:
        pm(x, y).backward()
        float(torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0))


def fails_in(where: str, cut: str, culprit: int) -> tuple[float, str]:
    """Seconds until this rank has an error, and the error. Afterwards the module refuses to go on, and another one on
    the same ranks can be made and trains."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    torch.manual_seed(0)
    model = Net(mse)
    eager = copy.deepcopy(model)
    pm = autopar.parallelize(model, mesh, batch(), **CUTS[cut])
    assert pm.device_mesh == mesh
    step(pm, "accumulating")
    start, text = time.monotonic(), ""
    try:
        with trouble(pm, where) if dist.get_rank() == culprit else contextlib.nullcontext():
            step(pm, where)
            pm.train()
            for _ in range(3):  # a rank may hear of it in its next step
                step(pm, "forward")
    except (RuntimeError, RunError, Trouble) as error:
        took, text = time.monotonic() - start, f"{type(error).__name__}: {error}"
    assert text, "every step went well"
    again = ""
    try:
        step(pm.train(), "forward")
    except RunError as error:
        again = str(error)
    assert "call parallelize again" in again, again
    pm = autopar.parallelize(copy.deepcopy(eager), mesh, batch(), **CUTS[cut])
    for module in (pm, eager):
        x, y = batch(seed=5)
        module(x, y).backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)) for module in (pm, eager)]
    assert abs(norms[0] - norms[1]) < 1e-5 * norms[1], norms
    return took, text


def fail_in(cases: list[tuple[str, str, int]]) -> list[tuple[float, str]]:
    """One case after the other."""
    failures.GRACE_SECONDS, failures.QUIET_SECONDS = 1.0, 0.2
    return [fails_in(*case) for case in cases]


def fails_at_value(number: int, culprit: int, **options: Any) -> tuple[float, str]:
    """One rank fails as it takes a value of the model, the ``number``-th that all ranks are asked for; seconds until
    this rank has an error, and the error. The next ``parallelize`` goes well."""
    calls, real = itertools.count(), FirstRankValues.__call__

    def take(self: FirstRankValues, name: str) -> torch.Tensor:
        if next(calls) == number and dist.get_rank() == culprit:
            raise torch.OutOfMemoryError(f"no room for '{name}'")
        return real(self, name)

    torch.manual_seed(0)
    model, start, text = Net(mse), time.monotonic(), ""
    with mock.patch.object(FirstRankValues, "__call__", take):
        try:
            autopar.parallelize(model, dist.get_world_size(), batch(), **options)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return time.monotonic() - start, text


def fail_at_values(cases: list[tuple[int, int]], options: dict[str, Any]) -> tuple[list[tuple[float, str]], float]:
    """One case after the other, and then the loss of a step of a module for which nothing failed."""
    answers = [fails_at_value(number, culprit, **options) for number, culprit in cases]
    torch.manual_seed(0)
    pm = autopar.parallelize(Net(mse), dist.get_world_size(), batch(), **options)
    return answers, float(pm.train_step(*batch()).detach())
