"""Process groups of a plan, on rank 0 of a world without others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.checkpoints.full_state_dict import OnFirstRank
from autopar.runtime.ranks.groups import Wanted, blocks, destroy_groups, groups_for, groups_on
from autopar.torch_private import fake_store
from autopar.words.meshes import Mesh

SQUARE = Mesh.of(data=2, tensor=2)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=6, store=fake_store())
    yield
    destroy_groups()
    dist.destroy_process_group()


def test_a_stage_of_several_axes_is_gathered_in_the_groups_of_its_pipeline(world: None) -> None:
    """Not in others, which its ranks would make among themselves while the rest of the world waits for them."""
    groups, stage = groups_for(torch.device("cpu")), (0, 1, 2, 3)
    groups.make([*(Wanted(b) for axes in ((0,), (1,), (0, 1)) for b in blocks(SQUARE, stage, axes)), Wanted((4, 5))])
    before, mesh = dict(groups.made), groups.mesh(SQUARE, stage)
    assert groups_on(mesh) is groups
    assert groups_on(mesh).along(mesh, (0, 1)) is groups.of(stage)
    assert groups.made == before


def test_a_mesh_stays_one_object_and_equal_to_the_callers(world: None) -> None:
    groups, ranks = groups_for(torch.device("cpu"), range(6)), tuple(range(6))
    mesh = Mesh.of(data=6)
    groups.make([Wanted(ranks)])
    own = groups.mesh(mesh, ranks)
    assert own == dist.device_mesh.init_device_mesh("cpu", (6,), mesh_dim_names=("data",))
    first = own.get_group()
    groups.destroy()
    groups.make([Wanted(ranks)])
    assert groups.mesh(mesh, ranks) is own
    assert own.get_group() is groups.of(ranks) is not first


def test_the_state_dict_of_another_rank_says_where_it_is() -> None:
    assert not OnFirstRank()
    with pytest.raises(RunError, match=r"gives 'a\.weight', as everything, to rank 0 alone"):
        OnFirstRank()["a.weight"]
