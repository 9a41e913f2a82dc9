"""Steps on one mesh whose rows do not divide into microbatches: whole ones and a smaller one, with one process's
numbers."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

import autopar


def spread() -> tuple[Any, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    plain = copy.deepcopy(model)
    pm = autopar.parallelize(
        model, 1, batch(32)[0], loss_fn=functional.cross_entropy, targets=[batch(32)[1]], microbatches=2
    )
    return pm, plain


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    y = torch.randint(0, 3, (rows,), generator=generator)
    y[: rows // 3] = -100  # ignored, and not as many in each microbatch
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64), y


def sizes_of_step(pm: Any, rows: int, **options: Any) -> tuple[torch.Tensor, list[int]]:
    seen = []
    run_call = pm._autopar.run_call

    def heard(args: Any, kwargs: Any, of_step: bool = False) -> Any:
        seen.append(args[0].shape[0])
        return run_call(args, kwargs, of_step=of_step)

    with mock.patch.object(pm._autopar, "run_call", heard):
        loss = pm.train_step(*batch(rows), **options)
    return loss, seen


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [
        (37, None, [16, 16, 5]), (37, 2, [19, 18]), (17, None, [16, 1]), (9, 4, [3, 3, 3]), (7, None, [7]),
        (3, 5, [1, 1, 1]),
    ],
)
def test_the_numbers_of_one_process(rows: int, count: int | None, expected: list[int]) -> None:
    pm, plain = spread()
    for _ in range(2):  # gradients add to those that are there
        loss, seen = sizes_of_step(pm, rows, microbatches=count)
        wanted = functional.cross_entropy(plain(batch(rows)[0]), batch(rows)[1])
        wanted.backward()
        assert seen == expected
        torch.testing.assert_close(loss, wanted.detach())
    pm.train_step(*batch(32))
    functional.cross_entropy(plain(batch(32)[0]), batch(32)[1]).backward()
    for name, param in pm.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)


def test_hooks_see_the_sums_of_the_step() -> None:
    pm, plain = spread()

    def stepped(param: torch.Tensor) -> None:
        param.data.sub_(param.grad)  # type: ignore[arg-type]

    for param in pm.parameters():
        param.register_post_accumulate_grad_hook(stepped)
    _, seen = sizes_of_step(pm, 17)
    assert seen == [1] * 17
    functional.cross_entropy(plain(batch(17)[0]), batch(17)[1]).backward()
    for name, param in pm.named_parameters():
        before = plain.get_parameter(name)
        torch.testing.assert_close(param.detach(), before.detach() - before.grad)


def test_a_step_that_breaks_leaves_the_gradients() -> None:
    pm, _ = spread()
    pm.train_step(*batch(32))
    before = [param.grad.clone() for param in pm.parameters()]
    backwards, calls = pm._autopar.backwards, []

    def breaks(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return backwards(*args)

    with mock.patch.object(pm._autopar, "backwards", breaks), pytest.raises(RuntimeError, match="no memory"):
        pm.train_step(*batch(17))
    assert all(torch.equal(p.grad, b) for p, b in zip(pm.parameters(), before, strict=True))
