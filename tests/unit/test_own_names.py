"""Attributes of a model that are called as a parallel module might call its own reach the model; one device."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ParallelModule
from autopar.errors import RunError
from autopar.runtime.as_module.submodules import Part

X = torch.randn(4, 4)

FOR_USERS = {
    "clip_grad_norm_", "compare_every", "device_mesh", "drain", "evaluate", "full_state_dict", "gradient_dtype",
    "load_full_state_dict", "module", "no_sync", "plan", "program", "record", "sampler", "shard", "train_step",
}  # fmt: skip
"""Names of parallel modules that the documents tell of."""


@pytest.mark.parametrize("kind", [ParallelModule, Part])
def test_what_is_not_for_users_has_a_prefix(kind: type) -> None:
    """A model of which an attribute has the same name could not be read or set."""
    announced = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    own = {*dir(kind), *announced} - {*dir(nn.Module), *vars(nn.Module())} - FOR_USERS
    assert own and [name for name in sorted(own) if not name.startswith(("_autopar", "__"))] == []


class Scales(nn.Module):
    """Private numbers, one of its class, and what forward leaves, called as a part might call its own."""

    kind = "soft"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._scale, self.stand_for, self._keys = nn.Linear(4, 4), 2.0, 1.5, [3.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stage = x.mean()
        return self.linear(x) * self._scale * self.stand_for * self._keys[0]


def test_private_names_of_parts_and_what_forward_leaves() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self._seed = Scales(), 1.0

        def _doubled(self) -> float:
            return self._seed * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.leads = x.sum()
            return self.inner(x).square().mean() * self._seed

    eager = Whole()
    model = copy.deepcopy(eager)
    pm: Any = autopar.parallelize(model, 1, X, on_change="recapture")
    assert copy.deepcopy(pm).inner.kind == pm.inner.kind == "soft"
    for _ in range(2):
        torch.testing.assert_close(pm(X), eager(X))
        assert pm.leads == eager.leads and pm.inner.stage == eager.inner.stage and pm._doubled() == eager._doubled()
        for each in (pm, eager):
            each._seed, each.inner._scale, each.inner.stand_for, each.inner._keys = 4.0, 5.0, 6.0, [7.0]
    assert [pm._seed, pm.inner._scale, pm.inner.stand_for, pm.inner._keys] == [4.0, 5.0, 6.0, [7.0]]


class Planned(nn.Module):
    """Has names that parallel modules have for users: a number, a method, and one that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plan, self.compare_every = nn.Linear(4, 8), 1.0, 1.0

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shard(self.first(x)).square().mean() * self.plan * self.compare_every


def test_names_of_the_model_and_of_parallel_modules() -> None:
    """Setting one of both on the parallel module was lost in silence: forward went on with the model's."""
    model = Planned()
    with pytest.warns(
        UserWarning, match="Planned and the parallel module both have .* called compare_every, plan, shard:"
    ):
        pm: Any = autopar.parallelize(model, 1, X, on_change="recapture")
    before = pm(X)
    for each in (pm, copy.deepcopy(pm)):
        with pytest.raises(RunError, match=r"compare_every was set, which is of the parallel module .* vars\(model\)"):
            each.compare_every = 3
    torch.testing.assert_close(pm(X), before, rtol=0, atol=0)
    with pytest.raises(RunError, match=r"plan of a parallel module cannot be set.*vars\(model\)\['plan'\]"):
        pm.plan = 7.0
    vars(model).update(compare_every=5.0, plan=7.0)
    torch.testing.assert_close(pm(X), 5 * 7 * before)
    assert pm.plan.stages and pm.compare_every is None


class Helped(nn.Module):
    """Calls a method of its own, and of a part."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part if part is not None else nn.Linear(4, 4)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.part(x))


def test_a_method_that_is_replaced_is_refused() -> None:
    """On the whole module as on its parts; what the model has no method for may be put there."""
    pm: Any = autopar.parallelize(Helped(Helped()), 1, X)
    before = pm(X)
    with pytest.raises(RunError, match=r"helper of the Helped was replaced on a parallel module: .* replace it"):
        pm.helper = lambda x: x
    with pytest.raises(RunError, match=r"helper of 'part' was replaced on a parallel module: .* replace it"):
        pm.part.helper = lambda x: x
    pm.logged = print
    pm.forward = functools.partial(pm.forward)
    torch.testing.assert_close(pm(X), before, rtol=0, atol=0)
    assert pm.logged is print


def test_names_of_others_are_not_spoken_of(recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries put methods into torch's own class: transformers does."""
    monkeypatch.setattr(nn.Module, "put_there_by_others", lambda self: self, raising=False)
    autopar.parallelize(nn.Linear(4, 4), 1, X)
    assert not [w for w in recwarn if "both have" in str(w.message)]


def test_what_tells_of_a_parallel_module_is_not_set() -> None:
    pm: Any = autopar.parallelize(nn.Linear(4, 4), 1, X)
    for name in ("plan", "program", "device_mesh", "module"):
        with pytest.raises(RunError, match=f"{name} of a parallel module cannot be set.*call yours otherwise$"):
            setattr(pm, name, 1)


class Compiles(nn.Module):
    """Has a method and an attribute of its own, where parallel modules have methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.sampler = nn.Linear(4, 4), len

    def compile(self) -> str:  # type: ignore[override]
        return "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_methods_that_both_have_are_told_of() -> None:
    said = r"called compile, sampler: [^$]*\n  sampler, which the object itself has, stay"
    with pytest.warns(UserWarning, match=said) as warned:
        pm: Any = autopar.parallelize(Compiles(), 1, X)
    assert __file__ in [each.filename for each in warned]
    assert pm.sampler is len and pm.compile() is None
    assert len(ParallelModule.sampler(pm, torch.utils.data.TensorDataset(X))) == 4
